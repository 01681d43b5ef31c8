"""Tests that `--memory SIZE` holds: random runs of engraft under a hard limit of exactly that size.

    cargo build --release
    sudo python benchmarks/memory_limits.py [--runs 20] [--seed 0] [--json FILE]

Each run draws a base, a method, a rank, a batch, a length and a size between the smallest that `engraft plan`
accepts and 1.5 times that, and trains two steps in a memory cgroup (see limited.py; needs root), which also
counts the page cache: the base is dropped from the cache before. Passes, with exit code 0, when every run
succeeds.
"""

import argparse
import pathlib
import random
import sys
import tempfile

import common
import limited

STEPS = 2
BATCHES = [1, 2, 3, 4, 8]
LENGTHS = [64, 128, 200, 256, 512]
METHODS = ["c_attn", "q,v", "all-linear", "prefix", "lora+prefix"]
RANKS = [1, 4, 8, 16, 64]
MOST_TOKENS = 2048  # in a step, so that a run takes seconds


def draw_setting(draw, sizes):
    """A random setting and how far its memory is above the smallest plan."""
    while True:
        setting = {"base": draw.choice(sizes), "method": draw.choice(METHODS), "rank": draw.choice(RANKS),
                   "batch": draw.choice(BATCHES), "seq": draw.choice(LENGTHS), "above": draw.uniform(1.0, 1.5)}
        if setting["batch"] * setting["seq"] <= MOST_TOKENS:
            return setting


def method_options(method, rank):
    """Options of engraft for one of METHODS."""
    if method == "prefix":
        return ["--method", "prefix", "--prefix-len", rank]
    if method == "lora+prefix":
        return ["--method", method, "--rank", rank, "--prefix-len", 10]
    return ["--method", "lora", "--targets", method, "--rank", rank]


def run(a, setting, folder):
    """One run under its limit."""
    base = common.base(a.bases, setting["base"])
    rows = common.write_rows(folder / "rows.jsonl", setting["batch"] * STEPS, setting["seq"])
    options = [*common.job(base, rows, setting["batch"], setting["seq"], STEPS),
               *method_options(setting["method"], setting["rank"])]
    least, _ = common.smallest(a.program, options)
    mib = -(-int(least * setting["above"]) // common.MIB)
    command = [*common.train_command(a.program, options, folder / "run"), "--memory", f"{mib}MiB"]
    with open(folder / "stdout", "w+", encoding="utf-8") as output, open(folder / "stderr", "w+",
                                                                         encoding="utf-8") as errors:
        result = limited.run(command, mib * common.MIB, evicted=[base, rows], stdout=output, stderr=errors)
        output.seek(0)
        errors.seek(0)
        found = common.events(output.read())
        said = "" if result["rc"] == 0 else common.last_line(errors.read())
    plan, done = found.get("plan", {}), found.get("done", {})
    return setting | result | {"smallest": least, "planned_bytes": plan.get("peak_bytes"), "said": said,
                               "policy": plan.get("policy"), "measured_bytes": done.get("measured_bytes")}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(p)
    p.add_argument("--runs", type=int, default=20)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--sizes", nargs="+", default=["tiny", "small", "medium"], help="bases to draw from")
    a = p.parse_args()

    draw = random.Random(a.seed)
    print(f"{'base':7} {'method':11} {'rank':>4} {'batch':>5} {'seq':>4} | MiB {'smallest':>8} {'--memory':>8} "
          f"{'planned':>8} {'resident':>8} {'in group':>8} | {'s':>6} exit", flush=True)
    results, passed = [], 0
    for _ in range(a.runs):
        with tempfile.TemporaryDirectory() as folder:
            result = run(a, draw_setting(draw, a.sizes), pathlib.Path(folder))
        results.append(result)
        passed += result["rc"] == 0
        sizes = " ".join(f"{result[key] / common.MIB:8.1f}" if result[key] else f"{'-':>8}"
                         for key in ("smallest", "limit", "planned_bytes", "maxrss_bytes", "max_usage_bytes"))
        killed = " killed" if result["killed"] else ""
        head = f"{result['base']:7} {result['method']:11} {result['rank']:4} {result['batch']:5} {result['seq']:4}"
        print(f"{head} |     {sizes} | {result['seconds']:6.1f} {result['rc']}{killed} "
              f"{result.get('note', '')}{result['said']}", flush=True)
        common.save(a.json, results)
    print(f"{passed} of {a.runs} ended well")
    sys.exit(0 if passed == a.runs else 1)


if __name__ == "__main__":
    main()
