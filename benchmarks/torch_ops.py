"""Measures with PyTorch what `device_check speed` measures on a GPU: a product, causal attention by its FLASH backend, and
norm, clipping and fused AdamW of 10 M trainables; prints a JSON line of the same figures.

    python benchmarks/torch_ops.py [--device cuda] [--small]

Each is the best of five series of repeats; the host waits for the device before and after a series. `--device cpu --small`
tries the script itself.
"""

import argparse
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def seconds(device, repeats, work):
    """Seconds of `work`, which runs once before for warm-up."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    work()
    wait()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda")
    p.add_argument("--small", action="store_true")
    a = p.parse_args()
    n, rows, cols = (9, 32, 64) if a.small else (8192, 4096, 4096)
    b, h, t, d = (1, 2, 70, 64) if a.small else (32, 16, 1024, 64)
    trainables, repeats = (5000, 1) if a.small else (10_000_000, 20)
    on, figures = {"device": a.device}, {}

    for name, dtype in DTYPES.items():
        x, w = torch.randn(n, rows, dtype=dtype, **on), torch.randn(rows, cols, dtype=dtype, **on)
        time_ = seconds(a.device, repeats, lambda: x @ w)
        figures[f"product, {name}"] = [2e-12 * n * rows * cols / time_, "TFLOP/s"]
    for name, dtype in DTYPES.items():
        q, k, v = (torch.randn(b, h, t, d, dtype=dtype, requires_grad=True, **on) for _ in range(3))
        grad = torch.randn(b, h, t, d, dtype=dtype, **on)
        pairs = 2e-12 * d * h * b * t * (t + 1) / 2
        backend = SDPBackend.FLASH_ATTENTION if a.device != "cpu" else SDPBackend.MATH
        with sdpa_kernel(backend):
            attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            ahead = seconds(a.device, repeats, attend)
            out = attend()
            back = seconds(a.device, repeats, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        for what, flops, time_ in [("forward", 2, ahead), ("backward", 5, back), ("both", 7, ahead + back)]:
            figures[f"attention {what}, {name}"] = [flops * pairs / time_, "TFLOP/s"]
    # Tensors of the size of a LoRA of rank 64 on a matrix of 768 x 768.
    tensors = [torch.randn(min(49_152, trainables - at), **on) for at in range(0, trainables, 49_152)]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(tensors, lr=1e-3, weight_decay=0.01, fused=a.device != "cpu")

    def update():
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        optimizer.step()
    figures["update"] = [1e3 * seconds(a.device, repeats, update), "ms"]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
