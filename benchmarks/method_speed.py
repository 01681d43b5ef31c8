"""Seconds of a step of each method, beside those of a LoRA and of PEFT, in rounds that alternate.

    cargo build --release
    python benchmarks/method_speed.py [--size small] [--peft] [--rounds 3] [--json FILE]

Rows of random tokens, F32. LoRA (also as PiSSA and OLoRA), DoRA, VeRA and AdaLoRA have rank 8 on all linear modules;
prefix and prompt have 20 virtual tokens; the others are as each side has them. A figure is the fastest step but the
first of all rounds; `of LoRA` and `of PEFT` are its quotients. With --peft it needs what peft_step.py needs. Prints a
Markdown table.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import common

LOW_RANK = ["--rank", "8", "--targets", "all-linear"]
ADALORA = ["--init-r", "8", "--target-r", "4", "--targets", "all-linear"]
PISSA, OLORA = ([*LOW_RANK, "--init-lora-weights", init] for init in ("pissa", "olora"))
METHODS = {"lora": LOW_RANK, "pissa": PISSA, "olora": OLORA, "dora": LOW_RANK, "vera": LOW_RANK, "adalora": ADALORA,
           "ia3": [], "ln_tuning": [], "prefix": [], "prompt_tuning": []}
# Starts of a LoRA.
STARTS = ("pissa", "olora")
# PEFT does not transpose GPT-2's Conv1D for OLoRA, and stops at its shape.
WITHOUT_PEER = ("olora",)


def ours(a, job, method, output):
    """Seconds of the fastest step but the first of one run of engraft."""
    kind = "lora" if method in STARTS else method
    options = [*job, "--method", kind, *METHODS[method], "--recompute", "none"]
    code, text, errors, _ = common.measured_run(common.train_command(a.program, options, output))
    if code:
        sys.exit(f"{method}: {common.last_line(errors)}")
    return min(step["seconds"] for step in common.events(text)["step"][1:])


def theirs(base, rows, a, method):
    """The same of PEFT, as the median of its steps but the first."""
    command = [sys.executable, common.HERE / "peft_step.py", base, rows, "--batch", a.batch, "--steps", a.steps,
               "--method", "lora" if method in STARTS else method, *METHODS[method]]
    done = subprocess.run(common.words(command), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{method} with PEFT: {common.last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])["s_per_step"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(p)
    p.add_argument("--size", default="small")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peft", action="store_true", help="PEFT as a second side")
    a = p.parse_args()
    found = {method: {"engraft": [], "peft": []} for method in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        base = common.base(a.bases, a.size)
        rows = common.write_rows(folder / "rows.jsonl", a.batch * a.steps, a.seq)
        job = [*common.job(base, rows, a.batch, a.seq, a.steps), "--micro-batch", a.batch]
        for number in range(a.rounds):
            for method, times in found.items():
                times["engraft"].append(ours(a, job, method, folder / f"{method}{number}"))
                if a.peft and method not in WITHOUT_PEER:
                    times["peft"].append(theirs(base, rows, a, method))
                print(number, method, {side: own[-1:] for side, own in times.items()}, file=sys.stderr, flush=True)
                common.save(a.json, found)
    lora = min(found["lora"]["engraft"])
    print("| method | seconds a step | of LoRA | PEFT | of PEFT |\n|---|---|---|---|---|")
    for method, times in found.items():
        own, peft = min(times["engraft"]), min(times["peft"], default=None)
        beside = f"{peft:.2f} | {own / peft:.2f} x" if peft else " | "
        print(f"| {method} | {own:.2f} | {own / lora:.2f} x | {beside} |")


if __name__ == "__main__":
    main()
