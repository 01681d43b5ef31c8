"""Combines LoRAs with PEFT's add_weighted_adapter and writes adapters and results to adapters/tests/fixtures/combined.

    python tests/golden/make_combined.py

first, second and third are adapters of bases/tiny. expected.safetensors holds for each combination CASE and module PATH
`CASE/PATH.A`, `CASE/PATH.B` or, where singular vectors have no fixed sign, the product `CASE/PATH.BA` [out, in]; the
masks that PEFT drew for DARE are `CASE/PATH.mask.WHAT.N` (U8), WHAT being A, B or BA, N the number of the adapter among
those that have the module. CASES below says what is combined how.
"""
import os
import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import gpt2_bases

OUT = HERE.parent.parent / "adapters/tests/fixtures/combined"
ADAPTERS = {
    "first": dict(r=3, lora_alpha=7, target_modules=["c_attn", "mlp.c_proj"]),
    "second": dict(r=3, lora_alpha=2, target_modules=["c_attn", "attn.c_proj"], use_rslora=True),
    "third": dict(r=2, lora_alpha=5, target_modules=["c_attn"], rank_pattern={"h.1.attn.c_attn": 4}),
}
TWO, THREE = {"first": 0.7, "second": -1.3}, {"first": 0.7, "second": -1.3, "third": 0.4}
PRUNED = dict(density=0.6)
FREQUENT = dict(density=0.6, majority_sign_method="frequency")
CASES = {
    "linear": (TWO, "linear", {}),
    "cat": (THREE, "cat", {}),
    "svd": (THREE, "svd", {}),
    "svd_rank_5": (THREE, "svd", dict(svd_rank=5)),
    "ties": (TWO, "ties", PRUNED),
    "ties_frequency": (TWO, "ties", FREQUENT),
    "ties_svd": (THREE, "ties_svd", PRUNED),
    "ties_svd_frequency": (THREE, "ties_svd", FREQUENT),
    "dare_linear": (TWO, "dare_linear", PRUNED),
    "dare_ties": (TWO, "dare_ties", PRUNED),
    "dare_linear_svd": (THREE, "dare_linear_svd", PRUNED),
    "dare_ties_svd": (THREE, "dare_ties_svd", FREQUENT),
    "magnitude_prune": (TWO, "magnitude_prune", PRUNED),
    "magnitude_prune_svd": (THREE, "magnitude_prune_svd", PRUNED),
}


def model_with_all():
    model = None
    for name, fields in ADAPTERS.items():
        config = LoraConfig(fan_in_fan_out=True, task_type="CAUSAL_LM", **fields)
        if model is None:
            model = get_peft_model(gpt2_bases.load("bases/tiny"), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    g = torch.Generator().manual_seed(211)
    for key, p in sorted(model.named_parameters()):
        if "lora_" in key:
            p.data = (0.15 if "lora_B" in key else 0.3) * torch.randn(p.shape, generator=g)
    return model


def modules(model, name):
    for path, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and name in module.lora_A:
            yield path, module


def combine(model, case):
    """The tensors of one combination, and the masks that were drawn for it."""
    weights, method, options = CASES[case]
    drawn, real = [], torch.bernoulli
    torch.bernoulli = lambda *args, **kw: drawn.append(real(*args, **kw)) or drawn[-1]
    torch.manual_seed(5)
    model.base_model.add_weighted_adapter(list(weights), list(weights.values()), "sum", method, **options)
    torch.bernoulli = real
    found, masks = {}, iter(drawn)
    for path, module in modules(model, "sum"):
        a, b = module.lora_A["sum"].weight.data, module.lora_B["sum"].weight.data
        if method.startswith("dare"):
            having = [name for name in weights if name in module.lora_A]
            for what in ["BA"] if method.endswith("svd") else ["A", "B"]:
                for number in range(len(having)):
                    mask = next(masks)
                    # PEFT prunes the delta of a Conv1D as [in, out].
                    mask = mask.T if what == "BA" else mask
                    found[f"{case}/{path}.mask.{what}.{number}"] = mask.to(torch.uint8).contiguous()
        # rsLoRA of the first adapter would make another scale; none of these begins with such an adapter.
        if module.scaling["sum"] != 1.0:
            raise SystemExit(f"{case}: {path} has scale {module.scaling['sum']}")
        if method.endswith("svd"):
            found[f"{case}/{path}.BA"] = (b.double() @ a.double()).float()
        else:
            found[f"{case}/{path}.A"], found[f"{case}/{path}.B"] = a.clone(), b.clone()
    if next(masks, None) is not None:
        raise SystemExit(f"{case}: more masks than modules")
    rank = model.peft_config["sum"].r
    model.delete_adapter("sum")
    print(case, "rank", rank, len(found), "tensors")
    return found


def main():
    os.chdir(HERE)
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    model = model_with_all()
    for name in ADAPTERS:
        model.save_pretrained(OUT, selected_adapters=[name])
    (OUT / "README.md").unlink()
    expected = {}
    for case in CASES:
        expected.update(combine(model, case))
    save_file(expected, OUT / "expected.safetensors")
    for path in OUT.rglob("*.*"):
        path.chmod(0o644)
    print(sum(path.stat().st_size for path in OUT.rglob("*.*")), "bytes")


main()
