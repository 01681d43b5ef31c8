"""Compares engraft with PEFT on the same rows, alternately, on this machine's CPU; prints medians and ratios.

    pip install -r benchmarks/requirements.txt
    cargo build --release
    python benchmarks/compare_peft.py [--size small] [--batch 4] [--seq 512] [--rounds 3] [--compile]
        [--targets all-linear --rank 16] [--masked 0.67] [--precision bf16] [--limit]

Both sides train from random FP16 weights in F32 arithmetic with the same data, rank, clip and optimizer. With
--precision bf16 engraft is given the same option; PEFT's base is BF16 and its step runs under autocast.
A round runs one side after the other, each in a separate process; speed is the median step after the
first, memory the peak resident set of the process. With --limit a round also times PyTorch's matrix products alone
(MKL, oneDNN). Their rate divided by the operations of a token (4 for each weight of a product, and causal attention) is
the upper bound that engraft's best step is compared with.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile

from common import HERE, RELEASE


def run(command):
    """Standard output of a command and the peak resident set of its process in bytes."""
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return output, usage.ru_maxrss * 1024


def engraft(a, base, rows, output):
    """One training run of ours."""
    command = [RELEASE / "engraft", "train", "--base", base, "--data", rows, "--output", output, "--json", "--no-shuffle",
               "--no-pack", "--seq-len", a.seq, "--batch", a.batch, "--steps", a.steps, "--lr", "2e-4",
               "--schedule", "constant", "--method", a.method, "--save-every", "0", "--precision", a.precision, *a.engraft]
    command += ["--rank", a.rank, "--alpha", 16, "--targets", a.targets] if a.method == "lora" else []
    text, peak = run(command)
    events = [json.loads(line) for line in text.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    speeds = [step["tokens_per_s"] for step in steps[1:]]
    return {"tokens_per_s": statistics.median(speeds), "best_tokens_per_s": max(speeds), "peak_bytes": peak,
            "losses": [step["loss"] for step in steps]}


def peft(a, base, rows, compiled):
    """One training run of PEFT."""
    command = [sys.executable, HERE / "peft_step.py", base, rows, "--batch", a.batch, "--steps", a.steps,
               "--method", a.method, "--rank", a.rank, "--targets", a.targets, "--dtype", a.precision]
    command += ["--autocast"] if a.precision == "bf16" else []
    command += ["--compile"] if compiled else []
    command += ["--checkpointing"] if "--recompute" in a.engraft else []
    return json.loads(run(command)[0].splitlines()[-1])


def operations(base, seq):
    """Operations of a token of a training that needs no gradient of the base."""
    config = json.loads((pathlib.Path(base) / "config.json").read_text(encoding="utf-8"))
    layers, width, vocab = (config[name] for name in ["n_layer", "n_embd", "vocab_size"])
    # Two products with each matrix; of attention two forward and five backward, half of (seq, seq) each.
    return 4 * (12 * layers * width**2 + vocab * width) + 7 * layers * seq * width


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="small")
    p.add_argument("--base", help="a folder made by gpt2.py; by default one is made")
    p.add_argument("--method", choices=["lora", "prefix"], default="lora")
    p.add_argument("--rank", type=int, default=8)
    p.add_argument("--targets", choices=["c_attn", "all-linear"], default="c_attn")
    p.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    p.add_argument("--masked", type=float, default=0, metavar="SHARE",
                   help="leave this share of each row, its beginning, out of the loss")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--compile", action="store_true", help="torch.compile as a third side")
    p.add_argument("--limit", action="store_true", help="engraft's share of the speed that matrix products alone allow")
    p.add_argument("engraft", nargs="*", help="further options for engraft, after --")
    a = p.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        base = a.base or folder / "base"
        if not a.base:
            run([sys.executable, HERE / "gpt2.py", a.size, base])
        draw = random.Random(0)
        rows = folder / "rows.jsonl"
        with open(rows, "w", encoding="utf-8") as file:
            for _ in range(a.batch * a.steps):
                ids = [draw.randrange(50257) for _ in range(a.seq)]
                masked = int(a.masked * a.seq)
                file.write(json.dumps({"input_ids": ids, "labels": [-100] * masked + ids[masked:]}) + "\n")
        limits = []
        sides = {"engraft": [], "peft": []} | ({"peft compiled": []} if a.compile else {})
        for round_ in range(a.rounds):
            for side, results in sides.items():
                result = (engraft(a, base, rows, folder / f"run{round_}") if side == "engraft"
                          else peft(a, base, rows, side == "peft compiled"))
                results.append(result)
                print(f"round {round_}: {side}: {result['tokens_per_s']:.0f} tokens/s, "
                      f"{result['peak_bytes'] / 2**30:.2f} GiB", flush=True)
            if a.limit:
                rate = 1e9 * float(run([sys.executable, HERE / "matmul_rate.py", "--dtype", a.precision])[0])
                limits.append(rate / operations(base, a.seq))
                print(f"round {round_}: limit: {limits[-1]:.0f} tokens/s at {rate / 1e9:.0f} GFLOP/s", flush=True)
    print(f"\n{platform.machine()}, {os.cpu_count()} CPUs; {a.size}, {a.method}, {a.targets}, rank {a.rank}, {a.precision}, "
          f"{a.batch} x {a.seq}, {a.masked:.0%} masked, median of {a.rounds}")
    ours = sides["engraft"]
    for side, results in sides.items():
        speed = statistics.median(result["tokens_per_s"] for result in results)
        memory = statistics.median(result["peak_bytes"] for result in results)
        speeds = statistics.median(o["tokens_per_s"] / r["tokens_per_s"] for o, r in zip(ours, results))
        memories = statistics.median(o["peak_bytes"] / r["peak_bytes"] for o, r in zip(ours, results))
        print(f"{side:14} {speed:7.0f} tokens/s {memory / 2**30:6.2f} GiB   engraft: {speeds:.2f} x its speed, "
              f"{memories:.2f} x its memory; first loss {results[0]['losses'][0]:.5f}")
    if limits:
        shares = statistics.median(o["best_tokens_per_s"] / limit for o, limit in zip(ours, limits))
        print(f"limit          {statistics.median(limits):7.0f} tokens/s              engraft: {shares:.0%} of it in its best step")


if __name__ == "__main__":
    main()
