"""Writes adapters in old and foreign files: loralib's, and PEFT's before it wrote safetensors.

    pip install loralib==0.1.2 torch==2.15.0 safetensors
    python tests/golden/make_old_files.py

loralib/ has the layers of loralib for bases/tiny, with a MergedLinear (queries and values) as c_attn and a Linear as
mlp.c_proj of every layer, rank 3 and lora_alpha 7: `adapter.pt` is their lora_state_dict, `nested.pt` the same as loralib's
own example saves it, and `merged.safetensors` has the weights that loralib makes of the base's.

old_peft/ is the adapter of cases/lora_c_attn as PEFT 0.2 wrote it: the fields of that version's LoraConfig and
`adapter_model.bin`, a pickle.
"""
import json
import pathlib

import loralib
import torch
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent
RANK, ALPHA = 3, 7


def loralib_files(out):
    out.mkdir(exist_ok=True)
    torch.manual_seed(1)
    base = load_file(HERE / "bases/tiny/model.safetensors")
    state, merged = {}, {}
    for layer in range(3):
        for name in ["attn.c_attn", "mlp.c_proj"]:
            key = f"transformer.h.{layer}.{name}"
            weight = base[f"{key}.weight"].float()
            options = dict(r=RANK, lora_alpha=ALPHA, fan_in_fan_out=True, merge_weights=True)
            if name == "attn.c_attn":
                module = loralib.MergedLinear(*weight.shape, enable_lora=[True, False, True], **options)
            else:
                module = loralib.Linear(*weight.shape, **options)
            module.weight.data.copy_(weight)
            torch.nn.init.normal_(module.lora_A, std=0.3)
            torch.nn.init.normal_(module.lora_B, std=0.3)
            state |= {f"{key}.{part}": values for part, values in loralib.lora_state_dict(module).items()}
            module.eval()  # merges
            merged[f"{key}.weight"] = module.weight.data.contiguous()
    assert all(values.ndim == 2 for values in state.values()) and len(state) == 12
    torch.save(state, out / "adapter.pt")
    torch.save({"model_state_dict": state}, out / "nested.pt")
    save_file(merged, out / "merged.safetensors")


def old_peft_files(out):
    out.mkdir(exist_ok=True)
    case = HERE / "cases/lora_c_attn/adapter"
    new = json.loads((case / "adapter_config.json").read_text(encoding="utf-8"))
    kept = ["base_model_name_or_path", "bias", "inference_mode", "lora_alpha", "lora_dropout", "modules_to_save",
            "peft_type", "r", "target_modules", "task_type", "fan_in_fan_out"]
    old = {name: new[name] for name in kept} | {"enable_lora": None, "merge_weights": False}
    (out / "adapter_config.json").write_text(json.dumps(old, indent=2, sort_keys=True), encoding="utf-8")
    torch.save(load_file(case / "adapter_model.safetensors"), out / "adapter_model.bin")


if __name__ == "__main__":
    loralib_files(HERE / "loralib")
    old_peft_files(HERE / "old_peft")
