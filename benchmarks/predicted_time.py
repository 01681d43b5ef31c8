"""Predicted against measured seconds of a step over twelve settings; exit code 1 where they differ too much.

    cargo build --release
    python benchmarks/predicted_time.py [--steps 6] [--only NAME] [--json FILE]

The prediction is that of the run's own plan, from speeds that engraft measures on this machine (`--measure-again`
forgets cached ones first). Measured is the median step after the first. Run nothing else meanwhile. The median
difference must be below 10%, and each below 25%.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import common

TYPICAL, MOST = 0.10, 0.25

# Name: (size, rows, tokens, share of each row without loss, further options).
SETTINGS = {
    "c_attn": ("small", 4, 512, 0, []),
    "all-linear": ("small", 4, 512, 0, ["--targets", "all-linear", "--rank", 16]),
    "prefix": ("small", 4, 512, 0, ["--method", "prefix"]),
    "masked": ("small", 4, 512, 0.67, []),
    "long": ("small", 1, 1024, 0, []),
    "short": ("small", 16, 128, 0, []),
    "recompute": ("small", 4, 512, 0, ["--recompute", "all"]),
    "streamed": ("small", 4, 512, 0, ["--stream-base", "on"]),
    "micro-batch": ("small", 4, 512, 0, ["--micro-batch", 1]),
    "inputs in a file": ("small", 4, 512, 0, ["--offload-inputs", "on"]),
    "bf16": ("small", 4, 512, 0, ["--precision", "bf16"]),
    "medium": ("medium", 2, 512, 0, []),
}


def write_rows(path, count, seq, masked):
    """`count` rows of random tokens; the first `masked` of each have no loss."""
    common.write_rows(path, count, seq)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        hidden = int(masked * seq)
        row["labels"] = [-100] * hidden + row["labels"][hidden:]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(a, folder, name):
    """(predicted, measured) seconds of a step."""
    size, batch, seq, masked, options = SETTINGS[name]
    rows = write_rows(folder / "rows.jsonl", batch * a.steps, seq, masked)
    job = [*common.job(common.base(a.bases, size), rows, batch, seq, a.steps), *options]
    # A run measures speeds only where they decide anything; `plan` always has them.
    subprocess.run(common.words([a.program, "plan", *job]), check=True, capture_output=True)
    output = folder / name.replace(" ", "-")
    code, text, errors, _ = common.measured_run(common.train_command(a.program, job, output))
    if code:
        sys.exit(f"{name}: exit code {code}: {common.last_line(errors)}")
    found = common.events(text)
    steps = [batch * seq / step["tokens_per_s"] for step in found["step"][1:]]
    return found["plan"]["seconds_per_step"], statistics.median(steps)


def forget():
    """Removes the speeds that earlier runs cached."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    cache = pathlib.Path(os.environ.get("ENGRAFT_CACHE") or home / "engraft")
    for name in ["calibration.json", "calibration-bf16.json"]:
        (cache / name).unlink(missing_ok=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(p)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--only", choices=SETTINGS, action="append", metavar="NAME", help="this setting; repeatable")
    p.add_argument("--measure-again", action="store_true", help="forget the speeds that earlier runs cached")
    a = p.parse_args()

    if a.measure_again:
        forget()
    results = {}
    print(f"{'setting':18} {'predicted':>10} {'measured':>10} {'difference':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in a.only or SETTINGS:
            predicted, measured = run(a, pathlib.Path(folder), name)
            results[name] = {"predicted_s": predicted, "measured_s": measured}
            print(f"{name:18} {predicted:9.3f}s {measured:9.3f}s {predicted / measured - 1:+10.0%}", flush=True)
            common.save(a.json, results)
    off = [abs(result["predicted_s"] / result["measured_s"] - 1) for result in results.values()]
    typical = statistics.median(off)
    print(f"median difference {typical:.0%}, largest {max(off):.0%}")
    sys.exit(1 if typical > TYPICAL or max(off) > MOST else 0)


if __name__ == "__main__":
    main()
