"""Measures Transformers reading prompts and generating greedily; prints a JSON line like examples/decoding.rs.

    python benchmarks/generate_peer.py BASE [--dtype f32|bf16|f16] [--device cpu|cuda] [--adapter DIR] [--prompt N,..]
        [--rows N,..] [--new N]
"""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

# Tokens of the prompt before the timed ones.
PROMPT = 32


def numbers(text):
    """Whole numbers between commas."""
    return [int(word) for word in text.split(",") if word]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("base")
    p.add_argument("--adapter")
    p.add_argument("--dtype", choices=["f32", "bf16", "f16"], default="f32")
    p.add_argument("--device", default="cpu")
    p.add_argument("--prompt", type=numbers, default=[512])
    p.add_argument("--rows", type=numbers, default=[1])
    p.add_argument("--new", type=int, default=128)
    a = p.parse_args()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[a.dtype]
    model = AutoModelForCausalLM.from_pretrained(a.base, dtype=dtype, attn_implementation="sdpa")
    if a.adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, a.adapter)
    model.to(a.device).eval()
    draw = torch.Generator().manual_seed(0)
    ids = lambda rows, count: torch.randint(0, model.config.vocab_size, (rows, count), generator=draw).to(a.device)
    results = {}
    with torch.inference_mode():
        for count in a.prompt:
            seconds = []
            for _ in range(6):
                row = ids(1, count)
                start = time.perf_counter()
                model(input_ids=row, use_cache=True, logits_to_keep=1).logits.cpu()
                seconds.append(time.perf_counter() - start)
            results[f"prompt {count}"] = count / statistics.median(seconds[1:])
        for rows in a.rows:
            row = ids(rows, PROMPT)

            def seconds(new):
                start = time.perf_counter()
                model.generate(input_ids=row, attention_mask=torch.ones_like(row), do_sample=False,
                               min_new_tokens=new, max_new_tokens=new, pad_token_id=0)
                return time.perf_counter() - start
            seconds(2)
            # The time of the prompt is not counted.
            results[f"rows {rows}"] = rows * a.new / (seconds(a.new + 1) - seconds(1))
    print(json.dumps({name: round(speed, 1) for name, speed in results.items()}))


if __name__ == "__main__":
    main()
