"""Writes the golden files next to itself with PEFT, Transformers and PyTorch: F32, CPU, seeded, one thread.

    python adapters/tests/golden/make_golden.py           # everything
    python adapters/tests/golden/make_golden.py CASE ..   # these cases alone; all other files keep their bytes

README.md describes each file. The same versions on the same kind of CPU give the same bytes.
"""
import json
import os
import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
if __name__ == "__main__":
    # PEFT writes target_modules from a Python set, so its order follows the hash seed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])

import peft
import torch
import transformers
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

B, T, V = 2, 9, 37


# ---- bases ---------------------------------------------------------------------------------------

def bigcode():
    c = transformers.GPTBigCodeConfig(
        vocab_size=V, n_positions=16, n_embd=24, n_layer=2, n_head=3, n_inner=40, multi_query=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh")
    return transformers.GPTBigCodeForCausalLM(c)


def llama(tied=False):
    c = transformers.LlamaConfig(
        vocab_size=V, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(c)


def llama_tied():
    return llama(tied=True)


def bert_config():
    return transformers.BertConfig(
        vocab_size=V, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5)


def bert():
    return transformers.BertForMaskedLM(bert_config())


def bert_inner():
    """The encoder alone, with the weights of `bert`; its module paths lack `bert.`."""
    model = transformers.BertModel(bert_config(), add_pooling_layer=False)
    weights = load_file(HERE / "bases/bert.safetensors")
    weights = {name[5:]: x.float() for name, x in weights.items() if name.startswith("bert.")}
    model.load_state_dict(weights)
    return model


def conv1d():
    """A base with Conv1D weights, [in, out]."""
    c = transformers.GPT2Config(
        vocab_size=V, n_positions=16, n_embd=6, n_layer=1, n_head=2, n_inner=9,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(c)


BASES = {"bigcode": bigcode, "llama": llama, "llama_tied": llama_tied, "bert": bert, "conv1d": conv1d}


def draw(model, seed):
    """Random weights that F16 holds: the file is F16 and the run is F32."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            x = torch.randn(p.shape, generator=g)
            norm = any(word in name for word in ("norm", "Norm", "ln_"))
            scale, mean = (0.2, 1.0) if norm and name.endswith("weight") else (0.1, 0.0) if p.dim() == 1 else (0.25, 0.0)
            p.copy_((mean + scale * x).half().float())


def write_base(name):
    model = BASES[name]()
    draw(model, seed=1)
    # A tied head is stored where the reader asks for it by name.
    tied = {"lm_head.weight"} if name != "llama" else set()
    weights = {key: x.half().contiguous().clone() for key, x in model.state_dict().items() if key not in tied}
    save_file(weights, HERE / f"bases/{name}.safetensors", metadata={"format": "pt"})


def load_base(name):
    if name == "bert_inner":
        return bert_inner().eval()
    model = BASES[name]()
    weights = load_file(HERE / f"bases/{name}.safetensors")
    missing = model.load_state_dict({key: x.float() for key, x in weights.items()}, strict=False).missing_keys
    if [key for key in missing if key != "lm_head.weight"]:
        raise SystemExit(f"{name}: {missing} are not in the file")
    model.tie_weights()
    return model.eval()


# ---- adapters ------------------------------------------------------------------------------------

def lora(**fields):
    return LoraConfig(**{"lora_dropout": 0.0, "r": 3, "lora_alpha": 7, **fields})


CASES = {
    "bigcode_lora": ("bigcode", lora(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM",
        rank_pattern={"h.1.attn.c_proj": 2, r"h\.\d+\.mlp\.c_fc": 4},
        alpha_pattern={"mlp.c_proj": 11, "^transformer.h.0.attn.c_attn": 2})),
    "bigcode_biases": ("bigcode", lora(bias="all", target_modules=["c_attn", "mlp.c_proj"])),
    "bigcode_ia3": ("bigcode", IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])),
    "bigcode_ln_tuning": ("bigcode", LNTuningConfig(target_modules=["ln_1", "ln_f"])),
    "llama_dora": ("llama", lora(use_dora=True, target_modules=r".*\.(q_proj|k_proj|down_proj|embed_tokens)")),
    "llama_layers": ("llama", lora(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], layers_to_transform=[1],
        layers_pattern=["layers"], exclude_modules=["v_proj"])),
    "llama_all_linear": ("llama", lora(
        r=2, target_modules="all-linear", modules_to_save=["lm_head", "model.norm"], task_type="CAUSAL_LM")),
    "llama_tied_embedding": ("llama_tied", lora(target_modules=["embed_tokens", "gate_proj"])),
    "bert_lora_bias": ("bert", lora(lora_bias=True, target_modules=["query", "value", "dense"])),
    "bert_inner": ("bert_inner", lora(target_modules=["query", "key"], task_type="FEATURE_EXTRACTION")),
    "conv1d_lora": ("conv1d", lora(fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"])),
    "conv1d_dora": ("conv1d", lora(fan_in_fan_out=True, use_dora=True, target_modules=["attn.c_proj", "c_fc"])),
    "conv1d_ia3": ("conv1d", IA3Config(
        fan_in_fan_out=True, target_modules=["attn.c_proj", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"])),
}


def randomise(model, seed):
    """Draws every trained tensor anew, so that nothing is zero, or one, any more."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.requires_grad:
                noise = torch.randn(p.shape, generator=g)
                p.copy_(0.3 * noise if "lora_A" in name or "lora_B" in name or "embedding_" in name else p + 0.2 * noise)


def outputs(model, ids):
    """What the tests compare: logits [b, t, V] or, of an encoder, its last hidden state [b, t, c]."""
    with torch.no_grad():
        out = model(input_ids=ids)
        return out.logits if hasattr(out, "logits") else out.last_hidden_state


def write_case(name, seed):
    base_name, config = CASES[name]
    folder = HERE / "cases" / name
    shutil.rmtree(folder, ignore_errors=True)
    model = get_peft_model(load_base(base_name), config)
    randomise(model, seed)
    model.save_pretrained(folder / "adapter")
    (folder / "adapter/README.md").unlink(missing_ok=True)

    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(7))
    plain = outputs(load_base(base_name), ids)
    adapted = outputs(model.eval(), ids)
    merged = PeftModel.from_pretrained(load_base(base_name), folder / "adapter").merge_and_unload().eval()
    found = outputs(merged, ids)
    # A tied head follows the merged embedding; a model with the adapter beside it keeps the head of the base.
    apart = (found - adapted).abs().max().item()
    if name not in TIED and apart > 1e-4:
        raise SystemExit(f"{name}: merged and adapted are {apart} apart")
    if (found - plain).abs().max().item() < 1e-2:
        raise SystemExit(f"{name}: the adapter changes nothing")
    tensors = {"input_ids": ids, "outputs": found.contiguous()}
    if base_name == "bert":
        with torch.no_grad():
            tensors["hidden"] = merged.bert(input_ids=ids).last_hidden_state.contiguous()
    if base_name == "conv1d":
        before = load_base(base_name).state_dict()
        after = {key: x.contiguous() for key, x in merged.state_dict().items() if not torch.equal(x, before[key])}
        tensors = {f"merged.{key}": x for key, x in after.items()}
    save_file(tensors, folder / "expected.safetensors")
    print(f"{name}: largest output {found.abs().max():.3f}, {apart:.1e} from the adapter kept apart")


TIED = {"llama_tied_embedding"}


def main():
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(CASES)
    if not sys.argv[1:]:
        shutil.rmtree(HERE / "bases", ignore_errors=True)
        (HERE / "bases").mkdir()
        for name in BASES:
            write_base(name)
        versions = {module.__name__: module.__version__ for module in (peft, torch, transformers)}
        (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    for name in chosen:
        write_case(name, seed=100 + list(CASES).index(name))


main()
