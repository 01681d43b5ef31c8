#!/usr/bin/env python3
"""Makes the embedded base: a byte-level BPE tokenizer and a small GPT-2.

Text comes from make_text.py next to this file, fresh for every window, so no
token is seen twice. The weights are rounded to F16 once at the end; the loss on
held-out text is measured before and after that. Runs on one CPU core:

    OMP_NUM_THREADS=1 python train_base.py --output first --stop-after 1000
    OMP_NUM_THREADS=1 python train_base.py --output . --start first \
        --first-window 8000 --steps 250 --warmup 10 --lr 1.8e-3

(a long run left halfway, then a short one whose learning rate falls to the end)
writes config.json, model.safetensors, tokenizer.json and birth.json.
"""

import argparse
import datetime
import hashlib
import json
import math
import pathlib
import platform
import time

import safetensors.torch
import tokenizers
import torch
import transformers

import make_text

HERE = pathlib.Path(__file__).resolve().parent
# Each seed draws its own corpus; the held-out one is never trained on.
TRAIN_SEED, HELD_OUT_SEED, WEIGHT_SEED = 20, 21, 22
HELD_OUT_DOCUMENTS = 1200
TOKENIZER_DOCUMENTS = 40_000
F16_MAX = 65504.0


def make_tokenizer(vocab_size):
    """Byte-level BPE as GPT-2 has it, trained on the first documents of the corpus."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[make_text.END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_text.documents(TRAIN_SEED, TOKENIZER_DOCUMENTS), trainer)
    return tokenizer


def token_stream(tokenizer, seed, count):
    """Ids of `count` documents in one row, end-of-text after each: (tokens,)."""
    end = tokenizer.token_to_id(make_text.END_OF_TEXT)
    ids = []
    for encoding in tokenizer.encode_batch(list(make_text.documents(seed, count))):
        ids += encoding.ids
        ids.append(end)
    return torch.tensor(ids, dtype=torch.int32)


def windows(stream, length):
    """Cuts a stream into windows that do not overlap: (windows, length)."""
    count = stream.numel() // length
    return stream[: count * length].view(count, length).long()


def make_config(args, tokenizer):
    end = tokenizer.token_to_id(make_text.END_OF_TEXT)
    return transformers.GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=args.positions,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        # The same function as gelu_new in one kernel; the file says gelu_new.
        activation_function="gelu_pytorch_tanh",
    )


@torch.no_grad()
def plant_copying(model):
    """Starts the model with a rough copying circuit instead of from noise alone.

    Two heads of block 0 look one token back and pass on what they see; the heads
    of block 1 look for a place whose previous token is the current one and repeat
    what stands there ("induction heads", Olsson et al. 2022, arXiv:2209.11895).
    Small models find this by themselves, but only after many million tokens.
    Everything stays trainable. The residual stream starts as `token` dims for the
    token and d dims (one head width) for the position.
    """
    width, d = model.config.n_embd, model.config.n_embd // model.config.n_head
    token, half = width - d, d // 2
    rng = torch.Generator().manual_seed(WEIGHT_SEED + 1)
    wte, wpe = model.transformer.wte.weight, model.transformer.wpe.weight
    wte.copy_(0.05 * torch.randn(wte.shape, generator=rng))
    wte[:, token:] = 0

    # p(t) = (cos ft, sin ft); random frequencies tell neighbours apart, low ones far places.
    slow = math.pi / 2.0 ** torch.arange(2, 8)
    f = torch.cat([math.pi * torch.rand(half - len(slow), generator=rng), slow])
    phase = torch.arange(model.config.n_positions)[:, None] * f  # (positions, d / 2)
    wpe[:, :token] = 0
    wpe[:, token:] = 0.1 * torch.cat([phase.cos(), phase.sin()], 1)
    cos, sin = f.cos().diag(), f.sin().diag()
    one_back = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])  # p(t) @ one_back = p(t - 1)

    def orthonormal():
        return torch.linalg.qr(torch.randn(token, token, generator=rng))[0].split(d, 1)

    seen, passed_on = orthonormal(), orthonormal()  # each: token / d matrices (token, d)
    previous, induction = model.transformer.h[0].attn, model.transformer.h[1].attn
    for head in range(token // d):
        q, k, v = (slice(i * width + head * d, i * width + (head + 1) * d) for i in range(3))
        out = slice(head * d, (head + 1) * d)
        if head < 2:
            previous.c_attn.weight[:, q], previous.c_attn.weight[:, k] = 0, 0
            previous.c_attn.weight[token:, q] = 1.3 * one_back
            previous.c_attn.weight[token:, k] = 1.3 * torch.eye(d)
            previous.c_attn.weight[:token, v] = seen[head]
            previous.c_proj.weight[out, :token] = 0.1 * passed_on[head].T
        induction.c_attn.weight[:, q], induction.c_attn.weight[:, k] = 0, 0
        induction.c_attn.weight[:token, q] = 1.3 * seen[head % 2]
        induction.c_attn.weight[:token, k] = 1.3 * passed_on[head % 2]
        induction.c_attn.weight[:token, v] = seen[head]
        induction.c_proj.weight[out, :token] = 0.15 * seen[head].T


def learning_rate(step, steps, warmup, peak):
    """Linear warmup, then cosine down to a twentieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model):
    """AdamW with decay on the matrices of the blocks only."""
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".h." in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def loss_of(model, rows):
    logits = model(rows).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, rows):
    model.eval()
    losses = [loss_of(model, part).item() * len(part) for part in rows.split(16)]
    model.train()
    return sum(losses) / len(rows)


def round_to_f16(model):
    """Rounds every weight to F16 in place; refuses what F16 cannot hold."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all() or parameter.abs().max() > F16_MAX:
            raise SystemExit(f"{name} does not fit F16: largest value {parameter.abs().max()}")
        parameter.data = parameter.data.half().float()


def save(model, tokenizer, folder, birth):
    folder.mkdir(parents=True, exist_ok=True)
    # The head is tied to wte, so it is not stored a second time.
    tensors = {
        name.removeprefix("transformer."): value.half().contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "birth.json").write_text(json.dumps(birth, indent=2) + "\n")


def load_weights(model, folder):
    """Starts from the F16 weights of an earlier run."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    model.transformer.load_state_dict({name: value.float() for name, value in tensors.items()})


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def birth_certificate(args, model, steps_done, seconds):
    return {
        "what": "GPT-2 pretrained from nothing on generated text, for engraft's examples",
        "licence": "MIT OR Apache-2.0",
        "date": datetime.date.today().isoformat(),
        "scripts_sha256": {
            name: sha256(HERE / name) for name in ("make_text.py", "train_base.py")
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
        },
        "device": f"CPU, {platform.machine()}, {torch.get_num_threads()} thread(s)",
        "seeds": {"text": TRAIN_SEED, "held_out_text": HELD_OUT_SEED, "weights": WEIGHT_SEED},
        "options": {k: v for k, v in vars(args).items() if k not in ("output", "start")},
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps_done,
        "tokens_seen": (args.first_window + steps_done * args.batch) * args.positions,
        "seconds": round(seconds),
        "started_from": json.loads((args.start / "birth.json").read_text()) if args.start else None,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--vocab", type=int, default=1536)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--stop-after", type=int, help="leave the schedule at this step")
    parser.add_argument("--start", type=pathlib.Path, help="folder of an earlier run")
    parser.add_argument("--first-window", type=int, default=0, help="windows the earlier run used")
    parser.add_argument("--save-every", type=int, default=250)
    args = parser.parse_args()

    began = time.time()
    torch.manual_seed(WEIGHT_SEED)
    tokenizer = make_tokenizer(args.vocab)
    held_out = windows(token_stream(tokenizer, HELD_OUT_SEED, HELD_OUT_DOCUMENTS), args.positions)
    model = transformers.GPT2LMHeadModel(make_config(args, tokenizer)).train()
    # More documents than needed: one has about 60 tokens.
    steps = args.stop_after or args.steps
    wanted = args.first_window + steps * args.batch
    rows = windows(token_stream(tokenizer, TRAIN_SEED, wanted * args.positions // 60), args.positions)
    if len(rows) < wanted:
        raise SystemExit(f"{len(rows)} windows where {wanted} are wanted: make more documents")
    rows = rows[args.first_window : wanted]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(rows)} windows,"
          f" text ready after {time.time() - began:.0f} s", flush=True)

    if args.start:
        load_weights(model, args.start)
    else:
        plant_copying(model)
    optimizer = make_optimizer(model)
    recent = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.warmup, args.lr)
        loss = loss_of(model, rows[step * args.batch : (step + 1) * args.batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = (recent + [loss.item()])[-50:]
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {sum(recent) / len(recent):.4f},"
                  f" {time.time() - began:.0f} s", flush=True)
        if (step + 1) % args.save_every == 0:
            save(model, tokenizer, args.output,
                 birth_certificate(args, model, step + 1, time.time() - began))

    birth = birth_certificate(args, model, steps, time.time() - began)
    birth["train_loss_last_50_steps"] = round(sum(recent) / len(recent), 4)
    birth["held_out_tokens"] = held_out.numel()
    birth["held_out_loss_f32"] = round(held_out_loss(model, held_out), 5)
    round_to_f16(model)
    birth["held_out_loss_f16"] = round(held_out_loss(model, held_out), 5)
    birth["largest_weight"] = max(p.abs().max().item() for p in model.parameters())
    save(model, tokenizer, args.output, birth)
    birth["model_sha256"] = sha256(args.output / "model.safetensors")
    (args.output / "birth.json").write_text(json.dumps(birth, indent=2) + "\n")
    print(json.dumps(birth, indent=2))


if __name__ == "__main__":
    main()
