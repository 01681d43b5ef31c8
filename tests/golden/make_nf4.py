"""Writes nf4.safetensors next to itself: matrices that bitsandbytes' CPU path quantised to NF4 with double quantisation.

    pip install bitsandbytes==0.50.2 torch==2.15.0 safetensors
    python tests/golden/make_nf4.py

README.md describes the file. Transformers transposes a Conv1D's weight before it quantises; so does this script.
"""
import pathlib

import torch
from bitsandbytes import functional
from safetensors.torch import save_file

# Inputs, outputs, standard deviation. More than 256 scales in two of them, and columns of zeros, of one value and with
# numbers as large and as small as FP16 has.
CASES = {"small": (64, 3, 0.02), "tall": (320, 70, 0.1), "wide": (128, 130, 1.0)}


def main():
    tensors = {"book": functional.create_dynamic_map(), "values": functional.get_4bit_type("nf4", device="cpu")}
    for seed, (name, (inputs, outputs, deviation)) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        weight = (deviation * torch.randn(inputs, outputs, generator=generator)).half()
        if name == "tall":
            weight[:, 5], weight[:, 6], weight[3, 7], weight[64:128, 8] = 0, 0.25, 8.0, 6e-8
        codes, state = functional.quantize_4bit(weight.t().contiguous(), quant_type="nf4", compress_statistics=True)
        state.dtype = torch.float32
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.codes"] = codes.flatten()
        tensors[f"{name}.scales"] = state.absmax
        tensors[f"{name}.factors"] = state.state2.absmax
        tensors[f"{name}.offset"] = state.offset.reshape(1)
        tensors[f"{name}.dequantised"] = functional.dequantize_4bit(codes, state).t().contiguous()
    save_file(tensors, pathlib.Path(__file__).with_name("nf4.safetensors"))


if __name__ == "__main__":
    main()
