"""Writes a GPT-2 folder as GGUF for llama.cpp: matrices as F16, Q8_0 or Q4_0, vectors as F32.

With Q4_0 the token embedding, which is also the head, stays F16, as on engraft's 4-bit base.

    python benchmarks/gguf_base.py BASE OUT.gguf [--type f16|q8_0|q4_0]
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
         "ln_1": "attn_norm", "ln_2": "ffn_norm"}
TOP = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}


def gguf_name(name):
    """llama.cpp's name of a tensor; None for tensors that it does not read."""
    name = name.removeprefix("transformer.")
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    parts = stem.split(".", 2)
    if parts[0] == "h" and parts[2] in NAMES:
        return f"blk.{parts[1]}.{NAMES[parts[2]]}.{kind}"
    return None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("base", type=pathlib.Path)
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--type", choices=["f16", "q8_0", "q4_0"], default="f16")
    a = p.parse_args()
    config = json.loads((a.base / "config.json").read_text(encoding="utf-8"))
    weights = load_file(a.base / "model.safetensors")

    writer = gguf.GGUFWriter(a.out, "gpt2")
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{a.type.upper()}"])

    # The benchmark feeds ids, but llama.cpp needs a vocabulary: the 256 characters that
    # stand for bytes (those of bytes that cannot be printed are U+0100 and up), then names.
    words = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else None for b in range(256)]
    hidden = iter(range(256, 512))
    words = [word or chr(next(hidden)) for word in words]
    words += [f"[{id}]" for id in range(len(words), config["vocab_size"])]
    merges = [f"{words[ord('a')]} {words[ord('b')]}"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(merges)

    for name, values in weights.items():
        to = gguf_name(name)
        if to is None:
            continue
        if values.ndim == 1:
            values = values.astype(np.float32)
        elif "wpe" in name:
            values = values.astype(np.float32)
        else:
            # Conv1D is (in, out); GGUF stores rows of inputs.
            matrix = values if "wte" in name else values.T
            if a.type == "q8_0" or a.type == "q4_0" and "wte" not in name:
                kind = gguf.GGMLQuantizationType[a.type.upper()]
                quantized = gguf.quantize(np.ascontiguousarray(matrix, dtype=np.float32), kind)
                writer.add_tensor(to, quantized, raw_dtype=kind)
                continue
            values = np.ascontiguousarray(matrix, dtype=np.float16)
        writer.add_tensor(to, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
