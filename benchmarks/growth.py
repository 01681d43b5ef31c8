"""Training speed as rows, lengths, threads and bases grow: tokens/s of LoRA r 8 on c_attn, and relative to the first one.

    cargo build --release --examples
    python benchmarks/growth.py [--bases FOLDER] [--steps 4]
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess

from common import RELEASE, ROOT, base, words

SMALL = [(1, 128), (1, 512), (1, 1024), (4, 128), (4, 512), (4, 1024), (16, 128), (16, 512)]
LARGER = {"medium": [(1, 512), (4, 512)], "xl": [(1, 128), (1, 512)]}


def speed(source, rows, seq, threads, steps):
    """Median tokens/s of the steps after the first."""
    command = words([RELEASE / "examples" / "throughput", source, rows, seq, steps])
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return statistics.median([float(word) for word in re.findall(r"(\d+) tokens/s", done.stdout)][1:])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bases", type=pathlib.Path, default=ROOT / "target" / "bases", metavar="FOLDER")
    p.add_argument("--sizes", default="small,medium,xl")
    p.add_argument("--steps", type=int, default=4)
    a = p.parse_args()
    cores = os.cpu_count()
    print(f"| base | rows x tokens | 1 thread | {cores} threads | gain |\n|---|---|---|---|---|")
    for size in a.sizes.split(","):
        source = base(a.bases, size)
        for rows, seq in SMALL if size == "small" else LARGER[size]:
            steps = a.steps if size != "xl" else 2
            one, all_ = (speed(source, rows, seq, threads, steps) for threads in (1, cores))
            print(f"| {size} | {rows} x {seq} | {one:.0f} | {all_:.0f} | {all_ / one:.2f} x |", flush=True)


if __name__ == "__main__":
    main()
