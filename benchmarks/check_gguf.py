"""Proves the GGUF files of `engraft export` with llama.cpp: its logits against those of Transformers and PEFT in F32.

    pip install -r benchmarks/requirements.txt
    cargo build --release --bins
    python benchmarks/check_gguf.py [--base FOLDER] [--adapter FOLDER] [--work FOLDER]

The base is that in examples/base, or in --base. Without --adapter a LoRA of rank 6 on all linear sites is trained for 40
steps first. For F32, F16, Q8_0 and Q4_0 files the table shows the largest difference of a logit (absolute, relative to the
largest logit, and over that of the base) for the base alone, the base with the LoRA, and the model with the LoRA folded
in, and how many of the next tokens that llama.cpp and engraft-infer choose greedily are the same. On CPUs llama.cpp looks
GELU up in a table of FP16 values; the column "FP16 GELU" is the largest difference from Transformers with such a GELU.
The script fails when

- logits of an F32 file differ by more than 1e-3 of the largest logit;
- those with the LoRA, or of the merged model, differ more than 1.5 times as much as the base's own (F16, Q8_0, Q4_0);
- a greedy token of an F32 or F16 file is another one. Those of Q8_0 and Q4_0 are only shown, because engraft-infer computes
  with the FP16 base.

Greedy texts are compared up to and with their end-of-text, where engraft-infer stops.

llama.cpp is the build in the npm package node-llama-cpp (see compare_generation.py), which needs npm, git and g++.
"""

import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import GPT2LMHeadModel

from common import RELEASE, ROOT, words
from compare_generation import llama_program

TYPES = ["f32", "f16", "q8_0", "q4_0"]
# Types that round more than FP16 does; engraft computes with no such base, so that tokens may be others.
COARSE = ["q8_0", "q4_0"]
NEW = 24
FACTOR = 1.5
F32_BOUND = 1e-3


def run(command):
    done = subprocess.run(words(command), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words(command))}\n{done.stderr}")
    return done.stdout


def trained(base, folder):
    """An adapter on all linear sites whose B is far from zero."""
    rows = folder / "rows.jsonl"
    draw = torch.Generator().manual_seed(3)
    vocab = json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = torch.randint(vocab, (8, 48), generator=draw).tolist()
    rows.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in ids), encoding="utf-8")
    options = ["--steps", 40, "--lr", "5e-3", "--rank", 6, "--alpha", 15, "--targets", "all-linear", "--batch", 4]
    run([RELEASE / "engraft", "train", "--base", base, "--data", rows, "--seq-len", 48, "--no-pack", *options,
         "--output", folder / "run"])
    return folder / "run" / "adapter"


def exported(base, adapter, folder):
    """The files of every kind and type."""
    files = {}
    for dtype in TYPES:
        for kind, to, more in [("base", "gguf", []), ("merged", "merged-gguf", ["--adapter", adapter])]:
            files[kind, dtype] = folder / f"{kind}-{dtype}.gguf"
            run([RELEASE / "engraft", "export", "--to", to, "--base", base, *more, "--dtype", dtype,
                 "--output", files[kind, dtype]])
    files["adapter"] = folder / "adapter.gguf"
    run([RELEASE / "engraft", "export", "--to", "gguf", "--base", base, "--adapter", adapter, "--output",
         files["adapter"]])
    return files


class RoundedGelu(torch.nn.Module):
    """GELU with argument and result in FP16, as llama.cpp computes it on CPUs between -10 and 10."""

    def forward(self, x):
        h = x.half().float()
        y = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return torch.where(x <= -10, torch.zeros_like(x), torch.where(x >= 10, x, y.half().float()))


def expected(base, adapter, texts, rounded):
    """Logits of Transformers, and of PEFT, in F32; `rounded`: with llama.cpp's GELU."""
    found = {}
    with torch.no_grad():
        model = GPT2LMHeadModel.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
        for block in model.transformer.h if rounded else []:
            block.mlp.act = RoundedGelu()
        for kind in ["base", "adapted"]:
            found[kind] = np.concatenate([model(torch.tensor([ids])).logits[0].numpy() for ids in texts])
            if kind == "base":
                model = PeftModel.from_pretrained(model, adapter).eval()
    return found


def greedy(base, adapter, texts):
    """What engraft-infer chooses greedily, with the end-of-text where it comes."""
    more = ["--adapter", adapter] if adapter else []
    end = json.loads((base / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    made = []
    for ids in texts:
        line = run([RELEASE / "engraft-infer", "generate", "--base", base, *more, "--input-ids", ",".join(map(str, ids)),
                    "--max-new-tokens", NEW, "--temperature", 0, "--json"])
        chosen = json.loads(line)["token_ids"]
        made.append(chosen if len(chosen) == NEW else [*chosen, end])
    return made


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", type=pathlib.Path, default=ROOT / "examples" / "base")
    p.add_argument("--adapter", type=pathlib.Path)
    p.add_argument("--work", type=pathlib.Path, default=ROOT / "target" / "gguf", metavar="FOLDER")
    p.add_argument("--peers", type=pathlib.Path, default=ROOT / "target" / "peers", metavar="FOLDER")
    a = p.parse_args()
    shutil.rmtree(a.work, ignore_errors=True)
    a.work.mkdir(parents=True)
    a.peers.mkdir(parents=True, exist_ok=True)
    program = llama_program(a.peers.resolve(), "llama_logits")
    adapter = a.adapter or trained(a.base, a.work)
    files = exported(a.base, adapter, a.work)
    draw = torch.Generator().manual_seed(5)
    vocab = json.loads((a.base / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    texts = [torch.randint(vocab, (length,), generator=draw).tolist() for length in [3, 17, 40]]
    ids = a.work / "ids.txt"
    ids.write_text("".join(" ".join(map(str, text)) + "\n" for text in texts), encoding="utf-8")
    wanted, rounded = (expected(a.base, adapter, texts, rounded) for rounded in [False, True])
    chosen = {"base": greedy(a.base, None, texts), "adapted": greedy(a.base, adapter, texts)}

    failed, tokens = [], {}
    print(f"{'':18}{'largest difference':>20}{'of the largest logit':>22}{'of the base':>13}{'FP16 GELU':>11}{'same tokens':>14}")
    for dtype in TYPES:
        own = None
        for name, kind, more in [("base", "base", []), ("adapted", "base", ["--lora", files["adapter"]]),
                                 ("merged", "merged", [])]:
            out = a.work / "logits"
            made = run([*program[:1], files[kind, dtype], *program[1:], "--ids", ids, "--out", out, "--new", NEW, *more])
            made = json.loads(made)
            logits = np.fromfile(out, dtype=np.float32).reshape(-1, made["vocab"])
            truth = "base" if name == "base" else "adapted"
            difference = float(np.abs(logits - wanted[truth]).max())
            relative = difference / float(np.abs(wanted[truth]).max())
            own = own or relative
            left = float(np.abs(logits - rounded[truth]).max())
            pairs = [pair for one, other in zip(made["tokens"], chosen[truth]) for pair in zip(one, other)]
            same = sum(one == other for one, other in pairs)
            tokens[dtype, name] = made["tokens"]
            print(f"{dtype:6}{name:12}{difference:20.2e}{relative:22.2e}{relative / own:12.2f}x{left:11.2e}"
                  f"{same:8} of {len(pairs)}")
            if dtype == "f32" and relative > F32_BOUND:
                failed.append(f"{dtype} {name}: {relative:.2e} of the largest logit")
            if dtype != "f32" and relative > FACTOR * own:
                failed.append(f"{dtype} {name}: {relative / own:.2f} times the difference of the base")
            if dtype not in COARSE and same != len(pairs):
                failed.append(f"{dtype} {name}: {len(pairs) - same} other tokens")
    for dtype in COARSE:
        if tokens[dtype, "adapted"] != tokens[dtype, "merged"]:
            print(f"{dtype}: the LoRA beside the base and folded into it choose different tokens")
    # The bounds can fail: without the LoRA the logits are others.
    change = float(np.abs(wanted["adapted"] - wanted["base"]).max())
    print(f"the LoRA changes a logit by up to {change:.2f}; the largest is {float(np.abs(wanted['adapted']).max()):.2f}")
    if failed:
        sys.exit("failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
