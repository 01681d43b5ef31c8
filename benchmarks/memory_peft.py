"""Compares peak memory and seconds per step of engraft and of PEFT + Transformers at equal work, on the CPU.

    pip install -r benchmarks/requirements.txt
    cargo build --release
    python benchmarks/memory_peft.py [--case small:8x512]... [--only engraft|peft] [--json FILE]

LoRA of rank 8 on c_attn over the same rows of random tokens, three steps each (by default small and medium
at 8 x 512, xl at 1 x 1024). PEFT runs in F32 and in BF16, with gradient checkpointing and without; engraft,
always F32 over the FP16 base, with `--memory auto` and with its smallest plan. Every run is a
separate process; memory is its peak resident set, time the median step after the first.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

import common

CASES = ["small:8x512", "medium:8x512", "xl:1x1024"]
PEFT = {
    "PEFT f32": [],
    "PEFT f32, checkpointing": ["--checkpointing"],
    "PEFT bf16": ["--dtype", "bf16"],
    "PEFT bf16, checkpointing": ["--dtype", "bf16", "--checkpointing"],
}


def run_peft(options, base, rows, batch, steps):
    """One run of peft_step.py."""
    code, output, errors, peak = common.measured_run(
        [sys.executable, common.HERE / "peft_step.py", base, rows, "--batch", batch, "--steps", steps, *options])
    if code:
        return {"failed": f"exit code {code}: {common.last_line(errors)}"}
    return json.loads(output.splitlines()[-1]) | {"peak_bytes": peak}


def run_engraft(program, options, memory, output):
    """One run of engraft with that --memory."""
    code, text, errors, peak = common.measured_run(
        [*common.train_command(program, options, output), "--memory", memory])
    if code:
        return {"failed": f"exit code {code}: {common.last_line(errors)}"}
    found = common.events(text)
    step_s = [step["tokens"] / step["tokens_per_s"] for step in found["step"][1:]]
    return {"s_per_step": statistics.median(step_s), "peak_bytes": peak, "memory": memory,
            "losses": [step["loss"] for step in found["step"]],
            "planned_bytes": found.get("plan", {}).get("peak_bytes"),
            "policy": found.get("plan", {}).get("policy")}


def run_case(a, case, folder):
    """Both sides of one case; yields results."""
    size, shape = case.split(":")
    batch, seq = map(int, shape.split("x"))
    base = common.base(a.bases, size)
    rows = common.write_rows(folder / f"{size}.jsonl", batch * a.steps, seq)
    if a.only != "engraft":
        for name, options in PEFT.items():
            if a.peft and name not in a.peft:
                continue
            yield {"case": case, "side": name} | run_peft(options, base, rows, batch, a.steps)
    if a.only != "peft":
        options = [*common.job(base, rows, batch, seq, a.steps), "--rank", 8, "--targets", "c_attn"]
        for name in ("auto", "smallest"):
            memory = name if name == "auto" else common.smallest(a.program, options)[1]
            result = run_engraft(a.program, options, memory, folder / f"{size}-{name}")
            yield {"case": case, "side": f"engraft --memory {memory} ({name})"} | result


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(p)
    p.add_argument("--case", action="append", metavar="SIZE:BATCHxSEQ", help=f"repeatable [default: {CASES}]")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--peft", action="append", choices=PEFT, help="this side of PEFT; repeatable [default: all]")
    p.add_argument("--only", choices=["engraft", "peft"], help="run one side only")
    a = p.parse_args()

    results = []
    print(f"{'case':14} {'side':38} {'peak':>9} {'s/step':>8}  losses", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in a.case or CASES:
            for result in run_case(a, case, pathlib.Path(folder)):
                results.append(result)
                tail = result.get("failed") or (f"{result['peak_bytes'] / 2**30:5.2f} GiB {result['s_per_step']:8.2f}"
                                                f"  {' '.join(f'{loss:.4f}' for loss in result['losses'])}")
                print(f"{case:14} {result['side']:38} {tail}", flush=True)
                common.save(a.json, results)
    sys.exit(1 if any("failed" in result for result in results) else 0)


if __name__ == "__main__":
    main()
