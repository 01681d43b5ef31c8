"""Checks that PEFT accepts an adapter folder that another program wrote, completely and without a warning.

    python tests/golden/check_ours.py ADAPTER_DIR BASE_DIR IDS.safetensors

ADAPTER_DIR holds adapter_config.json and adapter_model.safetensors, or such folders as `lora/`,
`dora/`, `vera/`, `ia3/`, `ln_tuning/` and `prefix/`. IDS holds `input_ids` i64 [b, t], `labels` i64 [b, t] (unshifted, -100 = unsupervised) and,
if wanted, `logits` f32 [b, t, V] to compare with. Base weights are rounded to F16 and run in F32.
Prints one JSON line; exits 1 with a sentence at an unknown config key, a missing, unexpected or
wrongly shaped tensor, a value PEFT did not take over, or any warning.
"""
import argparse
import dataclasses
import json
import pathlib
import sys
import warnings

import torch
import transformers
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

import gpt2_bases

# PEFT says it of every LayerNorm, also of those that it chooses itself.
NORMS = "Unsupported layer type '<class 'torch.nn.modules.normalization.LayerNorm'>'"
TIED = "Model has `tie_word_embeddings=True`"  # the head stays as it is
RANKS = "The following rank_pattern keys did not match any targeted module"  # of every AdaLoRA, also of its own
EMPTY = "Initializing zero-element tensors"  # of a module without ranks
STACKED = "Already found a `peft_config` attribute in the model"  # several folders: that is the point
QUIET = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)  # about the libraries, not about the folder


def fail(folder, what):
    sys.exit(f"{folder}: {what}")


def check_config(folder):
    """Every key is a field of PEFT's config class; PEFT itself would only warn and drop it."""
    found = json.loads((folder / "adapter_config.json").read_text())
    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(found.get("peft_type"))
    if kind is None:
        fail(folder, f"adapter_config.json: peft_type {found.get('peft_type')!r} is unknown to PEFT")
    unknown = sorted(set(found) - {f.name for f in dataclasses.fields(kind)})
    if unknown:
        fail(folder, f"adapter_config.json: keys {unknown} are unknown to {kind.__name__}")


def check_tensors(folder, model):
    """The file's tensors and PEFT's own are the same set, with the same values. PEFT ignores tensors
    that match no module (an adapter of more layers than the base has), so the set is compared here."""
    stored = load_file(folder / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(model)
    own = getattr(model.base_model, "prefix", "").removesuffix("lambda_")  # of two tuners on one base PEFT lists the tensors of both
    loaded = {key: x for key, x in loaded.items() if own in key}
    for what, keys in [("missing", set(loaded) - set(stored)), ("unexpected", set(stored) - set(loaded))]:
        if keys:
            fail(folder, f"{len(keys)} {what} tensors, such as {min(keys)}")
    for key, x in stored.items():
        if x.dtype != torch.float32:
            fail(folder, f"{key} is {x.dtype}, expected torch.float32")
        if x.shape != loaded[key].shape or not torch.equal(x, loaded[key]):
            fail(folder, f"{key} {list(x.shape)} is not what PEFT holds, {list(loaded[key].shape)}")
    return {"tensors": len(stored), "parameters": sum(x.numel() for x in stored.values())}


def attach(model, folder):
    """`model` with the adapter of `folder` on it, and what was in the folder."""
    check_config(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for category in QUIET:
            warnings.simplefilter("ignore", category)
        for text in (NORMS, RANKS, EMPTY, STACKED, TIED):
            warnings.filterwarnings("ignore", text)
        try:
            model = PeftModel.from_pretrained(model, str(folder))
        except (Warning, RuntimeError, ValueError, TypeError, KeyError) as e:
            fail(folder, f"PEFT: {type(e).__name__}: {e}")
    return model, check_tensors(folder, model)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("adapter", type=pathlib.Path)
    p.add_argument("base", type=pathlib.Path)
    p.add_argument("ids", type=pathlib.Path)
    a = p.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = gpt2_bases.load(a.base)
    # Only prefix and prompt tuning can wrap a base that already holds LoRA, DoRA, IA3 or norms, so these come first.
    methods = ("lora", "vera", "adalora", "ia3", "ln_tuning", "dora", "prefix", "prompt_tuning")
    folders = [a.adapter] if (a.adapter / "adapter_config.json").is_file() else \
        [f for f in (a.adapter / name for name in methods) if f.is_dir()]
    if not folders:
        fail(a.adapter, "neither adapter_config.json nor a folder of a method, such as lora/, is in it")
    report = {"adapter": str(a.adapter), "folders": {}}
    for folder in folders:
        if isinstance(model, PeftModel):
            model = model.get_base_model()
        model, report["folders"][folder.name] = attach(model, folder)
    batch = load_file(a.ids)
    with torch.no_grad():
        # Without labels: PEFT cannot add the penalty of an AdaLoRA that was loaded to be used.
        out = model.eval()(input_ids=batch["input_ids"])
    # Virtual tokens in front of a row have no label, and the last of them predicts the first token.
    labels = batch["labels"]
    labels = torch.nn.functional.pad(labels, (out.logits.shape[1] - labels.shape[1], 0), value=-100)
    report["supervised"] = int((labels[:, 1:] != -100).sum())
    shifted = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    report["loss"] = torch.nn.functional.cross_entropy(*shifted, ignore_index=-100).item()
    if "logits" in batch:
        report["max_logit_difference"] = (out.logits[:, -batch["logits"].shape[1]:] - batch["logits"]).abs().max().item()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
