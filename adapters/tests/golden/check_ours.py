"""By hand: does PEFT take a LoRA that `engraft_adapters::candle::save` wrote, whole and without a warning?

    python adapters/tests/golden/check_ours.py FOLDER

Makes a model of linear layers at the paths in the file, lets PEFT load the folder onto it, and compares every merged
weight with W + s B A from the file.
"""
import json
import pathlib
import sys
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file

folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "adapter_config.json").read_text())
tensors = load_file(folder / "adapter_model.safetensors")
paths = [name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name]
model = torch.nn.Module()
for path in paths:
    parent, *rest = model, *path.split(".")
    for name in rest[:-1]:
        if not hasattr(parent, name):
            parent.add_module(name, torch.nn.Module())
        parent = getattr(parent, name)
    a, b = (tensors[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
    parent.add_module(rest[-1], torch.nn.Linear(a.shape[1], b.shape[0], bias=False))
before = {path: model.get_submodule(path).weight.detach().clone() for path in paths}
warnings.simplefilter("error")
loaded = PeftModel.from_pretrained(model, folder)
for path in paths:
    layer = loaded.base_model.model.get_submodule(path)
    a, b = (tensors[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
    wanted = before[path] + layer.scaling["default"] * b @ a
    print(f"{path}: rank {layer.r['default']}, scale {layer.scaling['default']:.4f}")
    layer.merge()
    if not torch.allclose(layer.base_layer.weight, wanted, atol=1e-6) or torch.equal(wanted, before[path]):
        raise SystemExit(f"{path}: PEFT merges another weight")
print(f"PEFT takes {len(paths)} modules of {folder}; base {config['base_model_name_or_path']}")
