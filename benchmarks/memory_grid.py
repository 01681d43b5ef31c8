"""Planned against measured memory over a grid of settings; exit code 1 where they differ.

    cargo build --release
    python benchmarks/memory_grid.py [--size small] [--precision bf16] [--all] [--json FILE]

Each setting trains two steps of 4 rows. `counted` is the process's own count of heap and arenas at their
peak, which the plan must bound and meet within 3%. `resident` is the peak resident set of the process as
the kernel counts it, which the plan of the whole process must bound. By default 36 of the 108 settings run, such
that each value meets every value of each other option; --all runs all.
"""

import argparse
import itertools
import math
import pathlib
import sys
import tempfile

import common

BATCH, STEPS = 4, 2
BELOW = 0.03  # how far counted bytes may be below their plan
METHODS = {
    "c_attn": ["--method", "lora", "--targets", "c_attn"],
    "all-linear": ["--method", "lora", "--targets", "all-linear"],
    "prefix": ["--method", "prefix"],
}
RECOMPUTE = ["none", "linear", "all"]
STREAM = ["off", "on"]
OPTIMIZERS = {
    "adamw": ["--optimizer", "adamw"],
    "8bit": ["--optimizer", "adamw8bit"],
    "in a file": ["--optimizer", "adamw", "--offload-optimizer=on"],
}
MICRO_BATCH = [1, 4]


def settings(every):
    """(method, recompute, stream, optimizer, micro-batch): all, or those whose recompute is the sum of the
    other indices modulo 3. A method, an optimizer and a recompute then still meet any two-valued option, and any
    two of those meet through the three methods."""
    options = list(METHODS), STREAM, list(OPTIMIZERS), MICRO_BATCH
    for indices in itertools.product(*(range(len(values)) for values in options)):
        method, stream, optimizer, micro = (values[i] for values, i in zip(options, indices))
        for recompute in (RECOMPUTE if every else [RECOMPUTE[sum(indices) % 3]]):
            yield method, recompute, stream, optimizer, micro


def run(a, job, setting, output):
    """One run: planned, counted and resident bytes, or why it failed."""
    method, recompute, stream, optimizer, micro = setting
    options = [*job, *METHODS[method], "--recompute", recompute, f"--stream-base={stream}", *OPTIMIZERS[optimizer],
               "--micro-batch", micro]
    code, text, errors, peak = common.measured_run(common.train_command(a.program, options, output))
    if code:
        return {"failed": f"exit code {code}: {common.last_line(errors)}"}
    found = common.events(text)
    plan, done = found["plan"], found["done"]
    return {"planned_counted": done.get("planned_counted_bytes"), "counted": done.get("counted_bytes"),
            "planned": plan["peak_bytes"], "resident": peak, "moment": plan["peak_moment"],
            "policy": plan["policy"]}


def ratio(measured, planned):
    """Their quotient; not a number where the program counts nothing."""
    return measured / planned if measured and planned else math.nan


def mib(value):
    """MiB for the table."""
    return f"{value / common.MIB:8.1f}" if value else f"{'-':>8}"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(p)
    p.add_argument("--size", default="small")
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    p.add_argument("--all", action="store_true", help="all 108 settings")
    a = p.parse_args()

    print(f"{a.size}, {BATCH} x {a.seq}, {a.precision}; MiB")
    print(f"{'method':10} {'recompute':9} {'stream':6} {'optimizer':9} {'micro':5} | {'plan':>8} {'counted':>8} "
          f"{'ratio':>6} | {'plan':>8} {'resident':>8} {'ratio':>6} | peak in", flush=True)
    results, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        base = common.base(a.bases, a.size)
        rows = common.write_rows(folder / "rows.jsonl", BATCH * STEPS, a.seq)
        job = [*common.job(base, rows, BATCH, a.seq, STEPS), "--precision", a.precision]
        for number, setting in enumerate(settings(a.all)):
            result = run(a, job, setting, folder / f"run{number}")
            results.append({"setting": setting} | result)
            method, recompute, stream, optimizer, micro = setting
            head = f"{method:10} {recompute:9} {stream:6} {optimizer:9} {micro:5} |"
            if "failed" in result:
                wrong += 1
                print(head, result["failed"], flush=True)
                continue
            counted = ratio(result["counted"], result["planned_counted"])
            fine = 1 - BELOW <= counted <= 1 and result["resident"] <= result["planned"]
            wrong += not fine
            print(f"{head} {mib(result['planned_counted'])} {mib(result['counted'])} {counted:6.3f} | "
                  f"{mib(result['planned'])} {mib(result['resident'])} "
                  f"{ratio(result['resident'], result['planned']):6.3f} | {result['moment']}"
                  f"{'' if fine else '  WRONG'}", flush=True)
            common.save(a.json, results)
    print(f"{len(results) - wrong} of {len(results)} within both plans and at most {BELOW:.0%} below the counted one")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
