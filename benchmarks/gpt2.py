"""Writes a GPT-2 checkpoint folder with random FP16 weights at a real size.

    python benchmarks/gpt2.py small FOLDER

Sizes: tiny, small (124M), medium (355M), large (774M), xl (1.56B). Speed and memory do not depend on
the values. Biases and layer-norm gains are not left at 0 and 1, so that wrong wiring would show.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {  # layers, width, heads
    "tiny": (2, 64, 4),
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}


def write(size, folder, vocab=50257, seed=0):
    """Saves a model of that size in `folder`."""
    layers, width, heads = SIZES[size]
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab,
                        bos_token_id=vocab - 1, eos_token_id=vocab - 1)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.02)
            elif ".ln_" in name:
                parameter.normal_(1.0, 0.05)
    model.half().save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder")
    arguments = parser.parse_args()
    write(arguments.size, arguments.folder)
