"""Writes a GPT-2 checkpoint folder with random FP16 weights at a real size.

    python benchmarks/gpt2.py small FOLDER
    python benchmarks/gpt2.py 13b FOLDER --shards 8 [--dtype f32]

Sizes: tiny, small (124M), medium (355M), medium-2 (its first two layers), large (774M), xl (1.56B), 13b (12.9B, the shape of
Cerebras-GPT-13B). Speed and memory do not depend on the values. Biases and layer-norm gains are not left
at 0 and 1, so that swapped tensors would show. Needs numpy only and holds one tensor at a time, for any
size of model; 13b takes 26 GB of disk.
"""

import argparse
import json
import pathlib

import numpy

SIZES = {  # layers, width, heads, positions, activation
    "tiny": (2, 64, 4, 1024, "gelu_new"),
    "small": (12, 768, 12, 1024, "gelu_new"),
    "medium": (24, 1024, 16, 1024, "gelu_new"),
    "medium-2": (2, 1024, 16, 1024, "gelu_new"),
    "large": (36, 1280, 20, 1024, "gelu_new"),
    "xl": (48, 1600, 25, 1024, "gelu_new"),
    "13b": (40, 5120, 40, 2048, "gelu"),
}
DTYPES = {"f16": ("F16", "float16", numpy.float16), "f32": ("F32", "float32", numpy.float32)}
# Values are cut from one block of normal numbers, at another offset for each tensor. Its length is prime:
# no two rows of a matrix start at the same number.
BLOCK = 8_388_593


def tensors(layers, width, positions, vocab):
    """(name, shape) of every tensor, in the order of the forward pass; matrices are (inputs, outputs)."""
    yield "transformer.wte.weight", (vocab, width)
    yield "transformer.wpe.weight", (positions, width)
    for layer in range(layers):
        for part, *shape in (("ln_1", width), ("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width),
                             ("ln_2", width), ("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width)):
            yield f"transformer.h.{layer}.{part}.weight", tuple(shape)
            yield f"transformer.h.{layer}.{part}.bias", tuple(shape[-1:])
    yield "transformer.ln_f.weight", (width,)
    yield "transformer.ln_f.bias", (width,)


def size_of(shape):
    """Number of values of a tensor."""
    return int(numpy.prod(shape, dtype=numpy.int64))


def split(every, shards):
    """`every` cut into `shards` lists of about as many values each."""
    total, seen, parts = sum(size_of(shape) for _, shape in every), 0, [[] for _ in range(shards)]
    for name, shape in every:
        parts[seen * shards // total].append((name, shape))
        seen += size_of(shape)
    return [part for part in parts if part]


def write_shard(path, part, dtype, block, offset):
    """One safetensors file: 8 bytes of header length, header, values. Returns the next offset."""
    label, _, kind = DTYPES[dtype]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in part:
        start, end = end, end + size_of(shape) * kind().itemsize
        header[name] = {"dtype": label, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    gains = (1 + 2.5 * block[:1 << 16].astype(numpy.float32)).astype(kind)  # 1 +- 0.05
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in part:
            source, left = (gains if ".ln_" in name and name.endswith("weight") else block), size_of(shape)
            start = offset % len(source)
            offset += left
            while left:
                piece = source[start:start + left]
                file.write(piece)
                left, start = left - len(piece), 0
    return offset


def write(size, folder, vocab=50257, seed=0, dtype="f16", shards=1):
    """Saves a model of that size in `folder`, in `shards` files."""
    layers, width, heads, positions, activation = SIZES[size]
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    every = list(tensors(layers, width, positions, vocab))
    _, torch_dtype, kind = DTYPES[dtype]
    block = (numpy.random.default_rng(seed).standard_normal(BLOCK, dtype=numpy.float32) * 0.02).astype(kind)
    parts, index, offset = split(every, shards), {}, 0
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        offset = write_shard(folder / name, part, dtype, block, offset)
        index.update((tensor, name) for tensor, _ in part)
    if len(parts) > 1:
        table = {"metadata": {"total_size": offset * kind().itemsize}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=2) + "\n")
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": torch_dtype,
        "n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": positions, "n_inner": 4 * width,
        "vocab_size": vocab, "bos_token_id": vocab - 1, "eos_token_id": vocab - 1,
        "activation_function": activation, "layer_norm_epsilon": 1e-05, "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return offset


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder")
    parser.add_argument("--shards", type=int, default=1, help="largest number of safetensors files")
    parser.add_argument("--dtype", choices=DTYPES, default="f16")
    a = parser.parse_args()
    print(f"{a.folder}: {write(a.size, a.folder, dtype=a.dtype, shards=a.shards):,} values")
