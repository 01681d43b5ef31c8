"""Writes the golden files next to itself with PEFT, transformers and PyTorch: F32, CPU, seeded, one thread.

    python tests/golden/make_golden.py           # everything
    python tests/golden/make_golden.py CASE ..   # these cases alone; all other files keep their bytes

README.md describes each file. The same versions on the same kind of CPU give the same bytes.
"""
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
import warnings

HERE = pathlib.Path(__file__).resolve().parent
if __name__ == "__main__":
    # PEFT writes target_modules from a Python set, so its order follows the hash seed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])

import numpy
import peft
import safetensors
import torch
import transformers
from peft import (AdaLoraConfig, IA3Config, LNTuningConfig, LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig,
                  PromptTuningConfig, VeraConfig, get_peft_model)
from peft.optimizers import create_loraplus_optimizer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import gpt2_bases

STEPS, LR, BETAS, EPS, DECAY, CLIP = 10, 1e-2, (0.9, 0.999), 1e-8, 0.01, 1.0
TINY = "bases/tiny"
PROJECTIONS = {"base_model.vera_A", "base_model.vera_B"}
NORMS = "Unsupported layer type '<class 'torch.nn.modules.normalization.LayerNorm'>'"
TIED = "Model has `tie_word_embeddings=True`"
SECOND_TIME = "You are trying to modify a model with PEFT for a second time"


# ---- batches and the loss -------------------------------------------------------------------

def batch(vocab, b, t, seed):
    """ids [b, t] and labels [b, t] (unshifted, -100 = unsupervised): the first row has an unsupervised prompt,
    the second an unsupervised tail, the last a hole."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (b, t), generator=g)
    ids[0, 1], ids[1, 1] = 0, vocab - 1
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, -3:] = -100
    labels[-1, 5] = -100
    return ids, labels


def loss_of(logits, labels):
    """Mean cross-entropy over the supervised positions; position i predicts label i + 1."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def behind_virtual(labels, logits):
    """Labels [b, P + t] for logits [b, P + t, V]: -100 for each of P virtual tokens, as PEFT pads them."""
    return torch.nn.functional.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=-100)


def check_loss(out, labels, penalty=0.0):
    """The loss transformers returns is the plain mean of -log softmax, term by term in f64, and what a method adds."""
    terms = []
    labels = behind_virtual(labels, out.logits)
    logp = out.logits.detach().double().log_softmax(-1)
    for row, marks in enumerate(labels.tolist()):
        terms += [-logp[row, i, marks[i + 1]].item() for i in range(len(marks) - 1) if marks[i + 1] != -100]
    if abs(sum(terms) / len(terms) + float(penalty) - out.loss.item()) > 1e-6:
        raise SystemExit(f"the loss {out.loss.item()} is no mean over {len(terms)} supervised positions")


# ---- a case: a model, what is trained in it, and what it is called in the files -------------------

class Case:
    """`trained`: file key -> parameter. `extra`: file key -> function giving a further tensor to record.
    `masks`: file key -> 0/1 tensor that multiplies the gradient in the training run only.
    `undecayed`: file keys of tensors on which no weight decay acts. `frozen`: file keys of tensors that are not trained."""

    def __init__(self, model, trained, adapters):
        self.model, self.trained, self.adapters = model, trained, adapters
        self.extra, self.masks, self.projected, self.undecayed, self.frozen = {}, {}, None, set(), set()
        self.lora_plus_ratio = None  # the optimizer is PEFT's for LoRA+ with this ratio
        self.unconverted = None  # a folder with the initial adapter, from which PEFT makes a plain LoRA on saving
        self.adalora = None  # the model of PEFT that adds a penalty to the loss, and allocates ranks after each step

    def snapshot(self):
        now = {key: p.detach().clone() for key, p in self.trained.items()}
        now.update({key: read().detach().clone() for key, read in self.extra.items()})
        return now


def tensors_of(model):
    """file key -> parameter of a LoRA PeftModel, under exactly the keys PEFT writes."""
    plain = lambda n: (n.replace(".modules_to_save", "").replace(".default.", ".").removesuffix(".default")
                       .replace("magnitude_vector.weight", "magnitude_vector"))
    found = {plain(n): p for n, p in model.named_parameters() if p.requires_grad}
    stored = [key for key in get_peft_model_state_dict(model) if not key.endswith(("vera_A", "vera_B"))]
    if sorted(found) != sorted(stored):
        raise SystemExit("PEFT's file keys are no longer the parameter names without the adapter's name")
    return found


def randomise(trained, seed, scale):
    """Draws every parameter anew, so that B is not zero; `scale`: key -> standard deviation."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key in sorted(trained):
            p = trained[key]
            p.copy_(scale(key) * torch.randn(p.shape, generator=g))


def move(trained, seed, by):
    """Multiplies parameters by numbers around 1, with standard deviation `by`."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key in sorted(trained):
            trained[key].mul_(1 + by * torch.randn(trained[key].shape, generator=g))


def lora_scale(key):
    return 0.15 if "lora_B" in key else 0.3


def lora_model(base=None, **fields):
    fields = {"lora_dropout": 0.0, "fan_in_fan_out": True, "task_type": "CAUSAL_LM", **fields}
    return get_peft_model(base or gpt2_bases.load(TINY), LoraConfig(**fields))


def lora_case(seed, **fields):
    model = lora_model(**fields)
    trained = {key: p for key, p in tensors_of(model).items() if "lora_" in key}
    randomise(trained, seed, lora_scale)
    return Case(model, trained, {"": model})


def lora_c_attn():
    return lora_case(101, r=3, lora_alpha=7, target_modules=["c_attn"])


def lora_all_rslora_patterns():
    return lora_case(102, r=3, lora_alpha=5, target_modules=["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
                     use_rslora=True, rank_pattern={"attn.c_attn": 2, "h.1.mlp.c_fc": 5, r"h\.[02]\.mlp\.c_proj": 4},
                     alpha_pattern={"mlp.c_proj": 11, "h.2.attn.c_proj": 3})


def lora_layers():
    return lora_case(103, r=2, lora_alpha=3, target_modules=["c_proj"], layers_to_transform=[0, 2])


def lora_qv():
    """q and v each with their own rank 2 and alpha 3, written as one c_attn LoRA of rank 4 and alpha 6."""
    case = lora_case(104, r=4, lora_alpha=6, target_modules=["c_attn"])
    for key, p in case.trained.items():
        if "lora_B" in key:
            d = p.shape[0] // 3
            mask = torch.zeros_like(p)
            mask[:d, :2] = 1.0  # q reads the first two rows of A
            mask[2 * d :, 2:] = 1.0  # v the last two
            p.data.mul_(mask).add_(0.0)  # + 0: no negative zeros
            case.masks[key] = mask
    return case


def lora_rank_8():
    """A rank that CUDA fuses into its products, on all sites."""
    return lora_case(135, r=8, lora_alpha=6, target_modules=["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"])


def dora_case(seed, **fields):
    """The magnitudes are the norms of the base's columns, moved a little."""
    model = lora_model(use_dora=True, **fields)
    trained = tensors_of(model)
    magnitudes = {key: p for key, p in trained.items() if key.endswith("lora_magnitude_vector")}
    randomise({key: p for key, p in trained.items() if key not in magnitudes}, seed, lora_scale)
    move(magnitudes, seed + 1000, 0.2)
    return Case(model, trained, {"": model})


def dora_c_attn():
    return dora_case(114, r=3, lora_alpha=7, target_modules=["c_attn"])


def dora_all_rslora_patterns():
    return dora_case(115, r=3, lora_alpha=5, target_modules=["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
                     use_rslora=True, rank_pattern={"attn.c_attn": 2, r"h\.[02]\.mlp\.c_proj": 4},
                     alpha_pattern={"mlp.c_proj": 11})


def dora_layers():
    return dora_case(116, r=2, lora_alpha=3, target_modules=["c_proj"], layers_to_transform=[0, 2])


def dora_and_prefix():
    return with_prefix("dora", dora_case(117, r=2, lora_alpha=5, target_modules=["c_attn", "mlp.c_proj"]), 118)


def beside_case(seed, **fields):
    """Biases and norms start from the base's, moved a little; as in transformers' trainer they do not decay."""
    model = lora_model(r=3, lora_alpha=7, **fields)
    trained = tensors_of(model)
    beside = {key: p for key, p in trained.items() if "lora_" not in key}
    randomise({key: p for key, p in trained.items() if key not in beside}, seed, lora_scale)
    g = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for key in sorted(beside):
            beside[key].add_(0.2 * torch.randn(beside[key].shape, generator=g))
    case = Case(model, trained, {"": model})
    case.undecayed = set(beside)
    return case


def lora_bias_only():
    return beside_case(119, target_modules=["c_attn", "mlp.c_proj"], layers_to_transform=[0, 2], bias="lora_only")


def lora_bias_all():
    return beside_case(120, target_modules=["c_fc"], bias="all")


def lora_train_norms():
    return beside_case(121, target_modules=["c_attn"], modules_to_save=["ln_f", "ln_2", "h.1.ln_1"])


def dora_beside():
    return beside_case(122, target_modules=["c_attn"], use_dora=True, bias="lora_only", modules_to_save=["ln_1"])


def lora_frozen_a():
    """A is in the files and does not change."""
    case = lora_case(124, r=3, lora_alpha=7, target_modules=["c_attn", "attn.c_proj"])
    for key in [key for key in case.trained if "lora_A" in key]:
        frozen = case.trained.pop(key).requires_grad_(False)
        case.extra[key] = lambda frozen=frozen: frozen
    return case


def lora_wte():
    """A LoRA on the embedding of tokens, which the tied head does not see, with a rank of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(TIED))
        return lora_case(126, r=3, lora_alpha=7, target_modules=["c_attn", "wte"], rank_pattern={"wte": 5})


def lora_wte_layers():
    """By its whole path, which PEFT wants where layers are named."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", re.escape(TIED))
        return lora_case(127, r=2, lora_alpha=3, target_modules=["mlp.c_proj", "transformer.wte"],
                         layers_to_transform=[1], use_rslora=True)


def lora_plus():
    case = beside_case(128, target_modules=["c_attn", "mlp.c_proj"], bias="lora_only")
    case.lora_plus_ratio = 4.0
    return case


def lora_pissa():
    """PiSSA after a change of A and B. The tensors that are trained are half of those in the files, which are a plain
    LoRA of twice the rank: [A; A0], [B, -B0]."""
    model = lora_model(r=3, lora_alpha=7, target_modules=["c_attn", "mlp.c_proj"], init_lora_weights="pissa")
    trained = tensors_of(model)
    folder = tempfile.TemporaryDirectory()
    model.peft_config["default"].init_lora_weights = True  # else PEFT would take them out of the base once more
    model.save_pretrained(folder.name)
    model.peft_config["default"].init_lora_weights = "pissa"
    move(trained, 129, 0.3)
    case = Case(model, trained, {"": model})
    case.unconverted = folder
    return case


def prefix_case(base, seed, **fields):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SECOND_TIME)  # wrapping a base that holds LoRA is intended
        model = get_peft_model(base, PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM", **fields))
    encoder = model.prompt_encoder["default"]
    if encoder.prefix_projection:
        return prefix_projection_case(model, encoder, seed)
    trained = {"prompt_embeddings": encoder.embedding.weight}
    randomise(trained, seed, lambda key: 0.7)
    return Case(model, trained, {"": model})


def prefix_projection_case(model, encoder, seed):
    first, last = encoder.transform[0], encoder.transform[2]
    trained = {"proj.embedding": encoder.embedding.weight, "proj.in.weight": first.weight, "proj.in.bias": first.bias,
               "proj.out.weight": last.weight, "proj.out.bias": last.bias}
    scales = {"proj.embedding": 0.7, "proj.in.weight": 0.3, "proj.in.bias": 0.2, "proj.out.weight": 0.3,
              "proj.out.bias": 0.2}
    randomise(trained, seed, scales.get)
    case = Case(model, trained, {"": model})
    case.extra["prompt_embeddings"] = lambda: model.get_prompt_embedding_to_save("default")
    case.projected = encoder.transform  # its output, [b, P, 2 L d], is watched for its gradient
    return case


def prefix():
    return prefix_case(gpt2_bases.load(TINY), 105)


def prefix_projection():
    return prefix_case(gpt2_bases.load(TINY), 106, prefix_projection=True, encoder_hidden_size=13)


def with_prefix(kind, below, seed):
    """The modules of `below` inside the base, and that base wrapped in prefix tuning; both share one backward."""
    both = prefix_case(below.model.get_base_model(), seed)
    for p in below.trained.values():
        p.requires_grad_(True)  # wrapping in prefix tuning froze everything below
    trained = {f"{kind}.{k}": p for k, p in below.trained.items()}
    trained.update({f"prefix.{k}": p for k, p in both.trained.items()})
    return Case(both.model, trained, {kind: below.model, "prefix": both.model})


def lora_and_prefix():
    return with_prefix("lora", lora_case(107, r=2, lora_alpha=5, target_modules=["c_attn", "mlp.c_proj"]), 108)


def ln_tuning_case(base, seed, **fields):
    """Norms start from the base's, moved a little; as in transformers' trainer they do not decay."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NORMS)  # PEFT says it of every LayerNorm
        warnings.filterwarnings("ignore", SECOND_TIME)
        model = get_peft_model(base, LNTuningConfig(task_type="CAUSAL_LM", **fields))
    trained = {key: p for key, p in tensors_of(model).items() if "ln_tuning" in key}
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key in sorted(trained):
            trained[key].add_(0.2 * torch.randn(trained[key].shape, generator=g))
    case = Case(model, trained, {"": model})
    case.undecayed = set(trained)
    return case


def ln_tuning():
    return ln_tuning_case(gpt2_bases.load(TINY), 109)


def ln_tuning_regex():
    return ln_tuning_case(gpt2_bases.load(TINY), 110, target_modules=r".*(h\.[02]\.ln_2|h\.1\.ln_1)")


def lora_ln_tuning_and_prefix():
    """LoRA modules, then norms inside the base, and that base wrapped in prefix tuning; all share one backward."""
    def make_lora():
        return lora_case(111, r=2, lora_alpha=5, target_modules=["c_attn", "c_fc"])

    lora = make_lora()
    norms = ln_tuning_case(lora.model.get_base_model(), 112)
    last = prefix_case(norms.model.get_base_model(), 113)
    parts = {"lora": lora, "ln_tuning": norms, "prefix": last}
    trained = {f"{name}.{key}": p for name, part in parts.items() for key, p in part.trained.items()}
    for p in trained.values():
        p.requires_grad_(True)  # each wrapping froze what was there
    # PEFT would write the tensors of both tuners into each folder: each is saved from a base of its own.
    alone = {"lora": make_lora(), "ln_tuning": ln_tuning_case(gpt2_bases.load(TINY), 112), "prefix": last}
    case = Case(last.model, trained, {name: part.model for name, part in alone.items()})
    case.undecayed = {f"ln_tuning.{key}" for key in norms.trained}
    return case


def prompt_tuning_case(base, seed, length):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SECOND_TIME)
        model = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=length, task_type="CAUSAL_LM"))
    trained = {"prompt_embeddings": model.prompt_encoder["default"].embedding.weight}
    randomise(trained, seed, lambda key: 0.5)
    return Case(model, trained, {"": model})


def prompt_tuning():
    return prompt_tuning_case(gpt2_bases.load(TINY), 114, 4)


def lora_and_prompt_tuning():
    """LoRA modules inside the base, and that base wrapped in prompt tuning; both share one backward."""
    lora = lora_case(115, r=2, lora_alpha=5, target_modules=["c_attn", "mlp.c_proj"])
    both = prompt_tuning_case(lora.model.get_base_model(), 116, 3)
    for p in lora.trained.values():
        p.requires_grad_(True)  # wrapping in prompt tuning froze everything below
    trained = {f"lora.{k}": p for k, p in lora.trained.items()}
    trained.update({f"prompt_tuning.{k}": p for k, p in both.trained.items()})
    return Case(both.model, trained, {"lora": lora.model, "prompt_tuning": both.model})


def p_tuning():
    """P-tuning through an MLP, whose output is all that PEFT stores. Nothing is trained."""
    model = get_peft_model(gpt2_bases.load(TINY), PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=7, task_type="CAUSAL_LM"))
    encoder = model.prompt_encoder["default"]
    randomise(dict(encoder.named_parameters()), 117, lambda key: 0.6)
    case = Case(model, {}, {"": model})
    case.extra["prompt_embeddings"] = lambda: model.get_prompt_embedding_to_save("default")
    return case


def ia3_case(base, seed, **fields):
    """Vectors around 1. They decay: transformers' trainer leaves out norms and biases alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SECOND_TIME)
        model = get_peft_model(base, IA3Config(task_type="CAUSAL_LM", fan_in_fan_out=True, **fields))
    trained = {key: p for key, p in tensors_of(model).items() if "ia3_l" in key}
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key in sorted(trained):
            trained[key].add_(0.3 * torch.randn(trained[key].shape, generator=g))
    return Case(model, trained, {"": model})


def ia3():
    return ia3_case(gpt2_bases.load(TINY), 121)


def ia3_regex():
    return ia3_case(gpt2_bases.load(TINY), 122, target_modules=r".*(attn\.c_proj|h\.[02]\.mlp\.c_fc)",
                    feedforward_modules=r".*(mlp\.c_fc|h\.1\.attn\.c_proj)")


def lora_ia3_and_prefix():
    """LoRA modules, vectors around them (both on c_attn), and that base wrapped in prefix tuning; one backward."""
    def make_lora():
        return lora_case(123, r=2, lora_alpha=5, target_modules=["c_attn", "c_fc"])

    lora = make_lora()
    vectors = ia3_case(lora.model.get_base_model(), 124)
    last = prefix_case(vectors.model.get_base_model(), 125)
    parts = {"lora": lora, "ia3": vectors, "prefix": last}
    trained = {f"{name}.{key}": p for name, part in parts.items() for key, p in part.trained.items()}
    for p in trained.values():
        p.requires_grad_(True)  # each wrapping froze what was there
    alone = {"lora": make_lora(), "ia3": ia3_case(gpt2_bases.load(TINY), 124), "prefix": last}
    return Case(last.model, trained, {name: part.model for name, part in alone.items()})


def vera_case(base, seed, **fields):
    """A and B as PEFT draws them from the key, frozen; lambda_b not zero."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SECOND_TIME)
        warnings.filterwarnings("ignore", "Specified to not save vera_A")
        model = get_peft_model(base, VeraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **fields))
    trained = {key: p for key, p in tensors_of(model).items() if "vera_lambda" in key}
    randomise(trained, seed, lambda key: 0.4)
    case = Case(model, trained, {"": model})
    case.frozen = PROJECTIONS
    return case


def vera():
    return vera_case(gpt2_bases.load(TINY), 131, r=5, target_modules=["c_attn", "mlp.c_proj"], projection_prng_key=3)


def vera_without_projections():
    return vera_case(gpt2_bases.load(TINY), 132, r=3, target_modules=["c_fc"], layers_to_transform=[0, 2],
                     projection_prng_key=7, save_projection=False)


def lora_vera_and_ia3():
    """The deltas of two methods on c_attn, and vectors around them. The LoRA comes second: PEFT does not see the sizes
    of modules that already have one when it draws A and B."""
    def make_vera():
        return vera_case(gpt2_bases.load(TINY), 134, r=3, target_modules=["c_attn", "attn.c_proj"])

    def make_lora(base=None):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", SECOND_TIME)
            return lora_case(133, base=base, r=2, lora_alpha=5, target_modules=["c_attn"])

    low_rank = make_vera()
    lora = make_lora(low_rank.model.get_base_model())
    last = ia3_case(lora.model.get_base_model(), 135)
    parts = {"vera": low_rank, "lora": lora, "ia3": last}
    trained = {f"{name}.{key}": p for name, part in parts.items() for key, p in part.trained.items()}
    for p in trained.values():
        p.requires_grad_(True)  # each wrapping froze what was there
    alone = {"vera": make_vera(), "lora": make_lora(), "ia3": ia3_case(gpt2_bases.load(TINY), 135)}
    case = Case(last.model, trained, {name: part.model for name, part in alone.items()})
    case.frozen = {f"vera.{key}" for key in PROJECTIONS}
    return case


def adalora_scale(key):
    return 0.6 if "lora_E" in key else lora_scale(key)


def adalora_model(seed, **fields):
    model = get_peft_model(gpt2_bases.load(TINY), AdaLoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **fields))
    randomise(tensors_of(model), seed, adalora_scale)
    return model


def adalora_case(model):
    case = Case(model, tensors_of(model), {"": model})
    case.adalora = model.base_model
    return case


def adalora():
    """All phases of the schedule: ranks are taken away after steps 3 to 7, and stay so after 8 and 9."""
    return adalora_case(adalora_model(136, init_r=5, target_r=2, lora_alpha=7, target_modules=["c_attn", "mlp.c_proj"],
                                      tinit=2, tfinal=3, total_step=STEPS))


def adalora_layers():
    return adalora_case(adalora_model(137, init_r=4, target_r=1, lora_alpha=11, target_modules=["c_fc"], deltaT=3,
                                      layers_to_transform=[0, 2], beta1=0.7, beta2=0.6, orth_reg_weight=0.2,
                                      total_step=STEPS))


def adalora_allocated():
    """Files with the ranks that were left, of one module none, after a training; trained with them further."""
    model = adalora_model(138, init_r=3, target_r=1, lora_alpha=5, target_modules=["c_attn", "attn.c_proj"],
                          tinit=0, tfinal=1, total_step=3)
    with torch.no_grad():
        for key, p in tensors_of(model).items():
            if "h.1.attn.c_proj.lora" in key:
                p.mul_(1e-3)
    ids, labels = tiny_batch()
    for step in range(3):
        model(input_ids=ids, labels=labels).loss.backward()
        model.base_model.update_and_allocate(step)
        model.zero_grad(set_to_none=True)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(gpt2_bases.load(TINY), folder, is_trainable=True)
    again.peft_config["default"].total_step = 100  # no step of the record takes ranks away
    again.peft_config["default"].tinit = 90
    return adalora_case(again)


CASES = [lora_c_attn, lora_all_rslora_patterns, lora_layers, lora_qv, lora_rank_8, prefix, prefix_projection,
         lora_and_prefix,
         ln_tuning, ln_tuning_regex, lora_ln_tuning_and_prefix, prompt_tuning, lora_and_prompt_tuning, p_tuning,
         ia3, ia3_regex, lora_ia3_and_prefix, dora_c_attn, dora_all_rslora_patterns, dora_layers, dora_and_prefix,
         lora_bias_only, lora_bias_all, lora_train_norms, dora_beside, lora_frozen_a,
         lora_wte, lora_wte_layers, lora_plus, lora_pissa,
         vera, vera_without_projections, lora_vera_and_ia3,
         adalora, adalora_layers, adalora_allocated]


# ---- running a case -------------------------------------------------------------------------

def forward(case, ids, labels):
    out = case.model(input_ids=ids, labels=labels)
    if out.logits.dtype == torch.float64:
        # transformers' own casts the logits to F32
        out.loss = loss_of(out.logits, behind_virtual(labels, out.logits)) + penalty(case)
    return out


def penalty(case):
    """What PEFT adds to the loss of an AdaLoRA: the weighted mean of ||P P^T - I|| over all A and all B^T."""
    if case.adalora is None:
        return 0.0
    factors = [p.T if "lora_B" in key else p for key, p in case.trained.items() if "lora_E" not in key]
    norms = [torch.linalg.norm(p @ p.T - torch.eye(p.shape[0], dtype=p.dtype)) for p in factors]
    return case.adalora.peft_config["default"].orth_reg_weight * sum(norms) / len(norms)


def of_text(logits, ids):
    """Logits [b, t, V] behind the tokens of `ids` [b, t], without those behind virtual tokens in front of them."""
    return logits[:, -ids.shape[1]:].contiguous()


def gradients(case, ids, labels):
    """logits, loss and the gradient of every trained tensor (and of the projected prefix) at the initial state."""
    seen = []

    def watch(module, given, y):
        y.retain_grad()
        seen.append(y)

    hook = case.projected.register_forward_hook(watch) if case.projected else None
    out = forward(case, ids, labels)
    found = {"logits": of_text(out.logits, ids).detach(), "loss": out.loss.detach().view(1)}
    if case.trained:
        out.loss.backward()
    found.update({f"grad.{key}": p.grad.clone() for key, p in case.trained.items()})
    if hook:
        hook.remove()
        found["grad.prompt_embeddings"] = seen[0].grad.sum(0)  # (b, P, 2Ld) -> (P, 2Ld)
    case.model.zero_grad(set_to_none=True)
    return found, out


def train(case, ids, labels):
    """Ten AdamW steps on one batch: the loss before each update, the norm before clipping, the final tensors."""
    parameters = list(case.trained.values())
    decays = {True: [], False: []}
    for key, p in case.trained.items():
        decays[key not in case.undecayed].append(p)
    groups = [{"params": decays[True]}, {"params": decays[False], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if case.lora_plus_ratio:
        optimizer = create_loraplus_optimizer(
            case.model, torch.optim.AdamW, lr=LR, loraplus_lr_ratio=case.lora_plus_ratio, betas=BETAS, eps=EPS,
            loraplus_weight_decay=DECAY, foreach=False)
    else:
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        loss = forward(case, ids, labels).loss
        loss.backward()
        for key, mask in case.masks.items():
            case.trained[key].grad.mul_(mask.to(loss.dtype))
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=False).item())
        losses.append(loss.item())
        optimizer.step()
        if case.adalora:
            case.adalora.update_and_allocate(step)
        optimizer.zero_grad(set_to_none=True)
    found = {k: torch.tensor(x, dtype=torch.float64) for k, x in [("losses", losses), ("grad_norms", norms)]}
    found.update({f"final.{key}": x for key, x in case.snapshot().items()})
    for key, mask in case.masks.items():
        if (case.trained[key].detach()[mask == 0] != 0).any():
            raise SystemExit(f"{key}: a zero block moved")
    return found


def record(case, ids, labels):
    found, out = gradients(case, ids, labels)
    if out.logits.dtype == torch.float32:
        with torch.no_grad():
            check_loss(out, labels, penalty(case))
    if case.trained:
        found.update(train(case, ids, labels))
    return found


def in_f64(build, ids, labels):
    """The same case in f64 from the same initial values, to show the rounding error of F32."""
    case = build()
    case.model.double()
    return record(case, ids, labels)


def noise(found, exact):
    """Largest difference F32 - f64 per kind of tensor, relative to the tensor's largest element."""
    worst = {}
    for key, x in found.items():
        if x.numel() == 0:
            continue
        kind = key.split(".")[0]
        y = exact[key].double()
        worst[kind] = max(worst.get(kind, 0.0), ((x.double() - y).abs().max() / y.abs().max()).item())
    return {kind: float(f"{x:.1e}") for kind, x in worst.items()}


# ---- writing ----------------------------------------------------------------------------------

def save_adapters(case, folder):
    """Each adapter as PEFT writes it, less the model card; then read back by PEFT on a fresh base."""
    for name, model in case.adapters.items():
        here = folder / "adapter" / name
        if case.unconverted:
            model.save_pretrained(here, path_initial_model_for_weight_conversion=case.unconverted.name)
        else:
            model.save_pretrained(here)
        (here / "README.md").unlink()
    stored = {}
    for name in case.adapters:
        for key, x in load_file(folder / "adapter" / name / "adapter_model.safetensors").items():
            stored[f"{name}.{key}" if name else key] = x
    for key, x in case.snapshot().items():
        of_file = stored.get(key)
        if case.unconverted:  # [A; A0], [B, -B0]
            of_file = of_file[:x.shape[0]] if "lora_A" in key else of_file[:, :x.shape[1]]
        if not key.startswith("proj.") and not torch.equal(of_file, x):
            raise SystemExit(f"{folder}: {key} on disk is not what was run")
    return stored


def reload(folder, names):
    """The stored adapter folders on a fresh base, each by PeftModel.from_pretrained."""
    model = gpt2_bases.load(TINY)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NORMS)
        warnings.filterwarnings("ignore", SECOND_TIME)
        for name in names:
            model = PeftModel.from_pretrained(model, str(folder / "adapter" / name))
            if name in ("lora", "dora", "vera", "ia3", "ln_tuning") and name != list(names)[-1]:
                model = model.get_base_model()
    return model.eval()


def save_merged(folder):
    """merged.safetensors: the base's weights with the initial LoRA folded in by PEFT, F32, changed ones only."""
    before = gpt2_bases.load(TINY).state_dict()
    after = reload(folder, [""]).merge_and_unload().state_dict()
    changed = {k: x.contiguous() for k, x in after.items() if not torch.equal(x, before[k])}
    save_file(changed, folder / "merged.safetensors")


def make_case(build, ids, labels):
    folder = pathlib.Path("cases") / build.__name__
    case = build()
    stored = save_adapters(case, folder)
    initial = {k: x for k, x in case.snapshot().items() if k.startswith("proj.")}
    found = record(case, ids, labels)
    trained = set(stored) - case.frozen if case.trained else set()
    missing = [k for k in trained if f"final.{k}" not in found or k in case.trained and f"grad.{k}" not in found]
    if missing or case.trained and found["losses"][0].float() != found["loss"][0]:
        raise SystemExit(f"{folder}: incomplete {missing} or the first training loss differs")
    with torch.no_grad():
        again = of_text(reload(folder, case.adapters)(input_ids=ids).logits, ids)
        for name in case.adapters:  # each folder must also load alone
            reload(folder, [name])
    gap = (again - found["logits"]).abs().max().item()
    if gap > 1e-5:
        raise SystemExit(f"{folder}: reloaded by PEFT, the logits differ by {gap}")
    if build is lora_all_rslora_patterns:
        save_merged(folder)
    limits = noise(found, in_f64(build, ids, labels))
    found = {k: x.float().contiguous() for k, x in {**initial, **found}.items() if x.numel()}
    save_file({"input_ids": ids, "labels": labels, **found}, folder / "expected.safetensors")
    shown = {key: [round(x, digits) for x in found.get(key, torch.empty(0)).tolist()]
             for key, digits in (("loss", 4), ("losses", 4), ("grad_norms", 2))}
    print(f"{folder}: {shown} reload {gap:.1e}")
    return limits


def make_base(name, with_weights):
    """expected.safetensors of one base: logits and loss over the full n_positions (tiny: the cases' batch)."""
    model = gpt2_bases.load(f"bases/{name}").eval()
    c = model.config
    ids, labels = tiny_batch() if name == "tiny" else batch(c.vocab_size, 2, c.n_positions, 3)
    with torch.no_grad():
        out = model(input_ids=ids, labels=labels)
    check_loss(out, labels)
    found = {"input_ids": ids, "labels": labels, "logits": out.logits.contiguous(), "loss": out.loss.view(1)}
    if with_weights:
        found.update({f"f16.{n}": p.half() for n, p in model.named_parameters()})
    save_file(found, pathlib.Path("bases") / name / "expected.safetensors")
    exact = model.double()(input_ids=ids).logits
    print(f"bases/{name}: loss {out.loss.item():.5f}, largest logit {out.logits.abs().max():.2f}")
    return {"logits": noise({"logits": out.logits}, {"logits": exact})["logits"]}


def tiny_batch():
    return batch(61, 3, 11, 2)


def make_some(names):
    limits = json.loads((HERE / "noise.json").read_text())
    for build in (build for build in CASES if build.__name__ in names):
        shutil.rmtree(pathlib.Path("cases") / build.__name__, ignore_errors=True)
        limits["cases"][build.__name__] = make_case(build, *tiny_batch())
        for p in (pathlib.Path("cases") / build.__name__).rglob("*.*"):
            p.chmod(0o644)
    gpt2_bases.dump(HERE / "noise.json", limits)


def main():
    os.chdir(HERE)  # relative paths, since PEFT writes the base's path into adapter_config.json
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    if sys.argv[1:]:
        return make_some(sys.argv[1:])
    for folder in ("bases", "cases"):
        shutil.rmtree(folder, ignore_errors=True)
    limits = {"bases": {n: make_base(n, weights) for n, weights in gpt2_bases.write_all("bases").items()}, "cases": {}}
    for build in CASES:
        limits["cases"][build.__name__] = make_case(build, *tiny_batch())
    gpt2_bases.dump(HERE / "noise.json", limits)
    versions = {m.__name__: m.__version__ for m in (peft, transformers, torch, safetensors, numpy)}
    versions["python"] = platform.python_version()
    versions["machine"] = platform.machine()
    versions["torch_cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    gpt2_bases.dump(HERE / "versions.json", versions)
    files = [p for f in ("bases", "cases") for p in (HERE / f).rglob("*") if p.is_file()]
    for p in files:
        p.chmod(0o644)  # safetensors leaves 0600
    print(json.dumps(versions), f"{sum(p.stat().st_size for p in files)} bytes")


if __name__ == "__main__":
    main()
