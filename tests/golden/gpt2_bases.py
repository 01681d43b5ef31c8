"""Small random GPT-2 bases: how they are drawn, written in each of the formats a reader meets, and loaded.

Every base is loaded the way an FP16-at-rest engine sees it: whatever dtype the file holds is
rounded once to F16 (nearest, ties to even) and only then widened to F32 for the run.
"""
import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

PREFIX = "transformer."
PT = {"format": "pt"}
# Mask buffers of old uploads; no part of the model.
BUFFERS = (".attn.bias", ".attn.masked_bias")


def config(**changes):
    """A GPT2Config with every dropout 0; `changes` are GPT2Config fields."""
    fields = dict(vocab_size=37, n_positions=13, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                  resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, architectures=["GPT2LMHeadModel"], dtype="float16")
    return GPT2Config(**{**fields, **changes})


def shapes(c):
    """name -> shape of every stored tensor (Conv1D weights are [in, out]); the head only when it is untied."""
    d, inner = c.n_embd, c.n_inner or 4 * c.n_embd
    found = {"transformer.wte.weight": [c.vocab_size, d], "transformer.wpe.weight": [c.n_positions, d]}
    for i in range(c.n_layer):
        h = f"transformer.h.{i}."
        for name, dims in [("ln_1", [d]), ("attn.c_attn", [d, 3 * d]), ("attn.c_proj", [d, d]),
                           ("ln_2", [d]), ("mlp.c_fc", [d, inner]), ("mlp.c_proj", [inner, d])]:
            found[f"{h}{name}.weight"] = dims
            found[f"{h}{name}.bias"] = dims[-1:]
    found["transformer.ln_f.weight"] = found["transformer.ln_f.bias"] = [d]
    if not c.tie_word_embeddings:
        found["lm_head.weight"] = [c.vocab_size, d]
    return found


def draw(c, seed):
    """Random F32 weights. Scales are large enough that softmax, GELU and LayerNorm all work off their linear range."""
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for name, dims in shapes(c).items():
        x = torch.randn(dims, generator=g)
        if name.endswith(".bias"):
            x = 0.1 * x
        elif ".ln_" in name:
            x = 1.0 + 0.2 * x
        else:
            x = 0.25 * x
        weights[name] = x
    return weights


def half(weights):
    return {name: x.half() for name, x in weights.items()}


def write(folder, c, weights):
    """config.json and one model.safetensors."""
    folder.mkdir(parents=True)
    c.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata=PT)


def write_sharded(folder, c, weights):
    """Two shards; the cut falls inside a layer, as size-driven cuts do."""
    folder.mkdir(parents=True)
    c.save_pretrained(folder)
    names = list(weights)
    cut = len(names) // 2 + 1
    index = {"metadata": {"total_size": sum(x.nbytes for x in weights.values())}, "weight_map": {}}
    for k, part in enumerate([names[:cut], names[cut:]], 1):
        file = f"model-0000{k}-of-00002.safetensors"
        save_file({n: weights[n] for n in part}, folder / file, metadata=PT)
        index["weight_map"].update({n: file for n in part})
    index["weight_map"] = dict(sorted(index["weight_map"].items()))
    dump(folder / "model.safetensors.index.json", index)


def write_bin(folder, c, weights):
    """pytorch_model.bin in the zip format, as many uploads are: uint8 masks, and the tied head stored
    as a second name for the storage of wte."""
    folder.mkdir(parents=True)
    c.save_pretrained(folder)
    state = dict(weights)
    n = c.n_positions
    for i in range(c.n_layer):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(n, n, dtype=torch.uint8).tril().view(1, 1, n, n)
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(state, folder / "pytorch_model.bin")


def write_old(folder, c, weights):
    """Keys without `transformer.`, F32 mask buffers and a config in the style of the first gpt2 upload."""
    folder.mkdir(parents=True)
    n = c.n_positions
    state = {name.removeprefix(PREFIX): x for name, x in weights.items()}
    for i in range(c.n_layer):
        state[f"h.{i}.attn.bias"] = torch.ones(n, n).tril().view(1, 1, n, n)
    save_file(state, folder / "model.safetensors", metadata=PT)
    dump(folder / "config.json", {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0,
        "bos_token_id": 0, "embd_pdrop": 0.0, "eos_token_id": 0, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": n, "n_embd": c.n_embd, "n_head": c.n_head,
        "n_layer": c.n_layer, "n_positions": n, "resid_pdrop": 0.0, "summary_activation": None,
        "summary_first_dropout": 0.0, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": c.vocab_size})


def with_edges(weights):
    """Puts into wte[0] values that rounding to F16 easily gets wrong: ties, subnormals, underflow, -0."""
    edge = [1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 2**-24, 2**-25, 3 * 2**-25, 1.5 * 2**-25, -(2**-26), -0.0]
    weights["transformer.wte.weight"][0, : len(edge)] = torch.tensor(edge)
    return weights


def dump(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def load(folder):
    """The base in `folder` as F32 modules holding F16-rounded weights, eager attention, training mode."""
    model, info = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                  output_loading_info=True)
    unexpected = [k for k in info["unexpected_keys"] if not k.endswith(BUFFERS)]
    if info["missing_keys"] or unexpected or info["mismatched_keys"]:
        raise SystemExit(f"{folder}: transformers reads it only in part: {info}")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half().float())
    model.requires_grad_(False)
    return model.train()


def write_all(root):
    """Writes every base folder under `root`; returns name -> True where expected.safetensors also gets the
    F16-rounded weights as `f16.<name>`."""
    root = pathlib.Path(root)
    tiny = config(vocab_size=61, n_positions=40, n_embd=24, n_layer=3, n_head=3)
    write(root / "tiny", tiny, half(draw(tiny, 1)))
    differ = {
        "relu": dict(activation_function="relu"),
        "gelu": dict(activation_function="gelu"),
        "n_inner": dict(n_inner=23),
        "ln_eps": dict(layer_norm_epsilon=1e-3),
        "unscaled_attn": dict(scale_attn_weights=False),
        "inverse_layer_idx": dict(scale_attn_by_inverse_layer_idx=True),
        "untied": dict(tie_word_embeddings=False),
        "odd_heads": dict(n_embd=15, n_head=3),
    }
    for k, (name, change) in enumerate(differ.items()):
        c = config(**change)
        weights = draw(c, 10 + k)
        if name == "ln_eps":  # a small input variance, so that the epsilon matters
            weights["transformer.wte.weight"] *= 0.1
            weights["transformer.wpe.weight"] *= 0.1
        write(root / name, c, half(weights))
    plain = config()
    write(root / "bf16", config(dtype="bfloat16"), {n: x.bfloat16() for n, x in with_edges(draw(plain, 30)).items()})
    f32 = config(dtype="float32")
    write(root / "f32_exact", f32, {n: x.half().float() for n, x in draw(plain, 31).items()})
    write(root / "f32_rounded", f32, with_edges(draw(plain, 32)))
    write_old(root / "old_upload", plain, half(draw(plain, 33)))
    write_sharded(root / "sharded", plain, half(draw(plain, 34)))
    write_bin(root / "torch_bin", plain, half(draw(plain, 35)))
    rounds = {"bf16", "f32_rounded"}
    return {p.name: p.name in rounds for p in sorted(root.iterdir())}
