"""Prints the best rate in GFLOP/s at which PyTorch multiplies matrices of GPT-2's sizes (F32: MKL, BF16: oneDNN).

    python benchmarks/matmul_rate.py [--dtype bf16] [--width 768] [--rows 2048] [--seconds 3]
"""

import argparse
import time

import torch


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--rows", type=int, default=2048)
    p.add_argument("--seconds", type=float, default=3)
    a = p.parse_args()

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype]
    best = 0
    for inner, outer in [(a.width, 3 * a.width), (a.width, 4 * a.width), (4 * a.width, a.width)]:
        x, w = torch.randn(a.rows, inner, dtype=dtype), torch.randn(inner, outer, dtype=dtype)
        y = x @ w
        end = time.perf_counter() + a.seconds / 3
        while (start := time.perf_counter()) < end:
            torch.mm(x, w, out=y)
            best = max(best, 2 * a.rows * inner * outer / (time.perf_counter() - start))
    print(f"{best / 1e9:.1f}")


if __name__ == "__main__":
    main()
