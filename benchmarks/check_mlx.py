"""Proves the folder of `engraft export --to mlx` with mlx-lm: its logits against those of Transformers and PEFT in F32.

    pip install -r benchmarks/requirements.txt "mlx[cpu]" mlx-lm
    cargo build --release --bins
    python benchmarks/check_mlx.py [--base FOLDER] [--adapter FOLDER] [--work FOLDER]

The base is that in examples/base, or in --base. Without --adapter a LoRA of rank 6 on all linear sites is trained for 40
steps first. mlx-lm loads the base as it is and the exported folder with its own `load_adapters`, and computes in F32. Then
the folder is read back by `engraft export --to peft`. The script fails when logits differ by more than 1e-3 of the largest logit, or
when a tensor that was read back is another one.
"""

import argparse
import json
import pathlib
import shutil
import sys

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

from check_gguf import F32_BOUND, expected, run, trained
from common import RELEASE, ROOT


def found(base, config, adapter, texts):
    """Logits of mlx-lm in F32, without the adapter and with it."""
    # Configs of Transformers' newer versions have no n_ctx, which mlx-lm asks for.
    model, _ = load_model(base, model_config={"n_ctx": config["n_positions"]})
    model.set_dtype(mx.float32)
    logits = {}
    for kind in ["base", "adapted"]:
        if kind == "adapted":
            model = load_adapters(model, str(adapter))
        model.eval()
        logits[kind] = np.concatenate([np.array(model(mx.array([ids])))[0] for ids in texts])
    return logits


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", type=pathlib.Path, default=ROOT / "examples" / "base")
    p.add_argument("--adapter", type=pathlib.Path)
    p.add_argument("--work", type=pathlib.Path, default=ROOT / "target" / "mlx", metavar="FOLDER")
    a = p.parse_args()
    shutil.rmtree(a.work, ignore_errors=True)
    a.work.mkdir(parents=True)
    adapter = a.adapter or trained(a.base, a.work)
    folder, again = a.work / "adapter", a.work / "again"
    run([RELEASE / "engraft", "export", "--to", "mlx", "--base", a.base, "--adapter", adapter, "--output", folder])
    draw = torch.Generator().manual_seed(5)
    config = json.loads((a.base / "config.json").read_text(encoding="utf-8"))
    texts = [torch.randint(config["vocab_size"], (length,), generator=draw).tolist() for length in [3, 17, 40]]
    theirs = expected(a.base, adapter, texts, False)
    failed = []
    for kind, logits in found(a.base, config, folder, texts).items():
        largest = float(np.abs(theirs[kind]).max())
        difference = float(np.abs(logits - theirs[kind]).max())
        print(f"{kind}: largest difference {difference:.1e}, {difference / largest:.1e} of the largest logit")
        if not difference <= F32_BOUND * largest:
            failed.append(f"{kind}: logits differ")
    moved = float(np.abs(theirs["adapted"] - theirs["base"]).max())
    print(f"the adapter changes logits by up to {moved:.1f}")
    run([RELEASE / "engraft", "export", "--to", "peft", "--base", a.base, "--adapter", folder, "--output", again])
    before, after = (load_file(path / "adapter_model.safetensors") for path in [adapter, again])
    # The scale is in the config of both; ranks are equal.
    same = before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    print(f"read back: {len(after)} tensors, {'all the same' if same else 'not the same'}")
    if not same:
        failed.append("tensors that were read back differ")
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
