"""Trains an adapter with PEFT on the rows of a JSONL file; prints one JSON line.

    python benchmarks/peft_step.py BASE ROWS.jsonl --batch 4 --steps 4 [--method prefix] [--compile] ...

Speed is that of the median step after the first; memory is the peak resident set of the process, and
`import_bytes` the part of it that the imports alone take. With --dtype bf16 or f16 the base and its activations are of that
type; PEFT keeps the adapter in FP32. On a GPU, and with --autocast, the step runs under autocast, f16 with a gradient
scaler. The base's own dropouts are off, as they are in engraft. With --fit a batch that the GPU has no memory for is halved
until one runs; `batch` tells which did.
"""

import argparse
import json
import resource
import statistics
import time

import peft
import torch
import transformers
from peft import (AdaLoraConfig, IA3Config, LNTuningConfig, LoraConfig, PrefixTuningConfig, PromptTuningConfig,
                  VeraConfig, get_peft_model)
from transformers import AutoModelForCausalLM

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


METHODS = ["lora", "dora", "vera", "adalora", "ia3", "ln_tuning", "prefix", "prompt_tuning"]


def config(method, rank, targets, init, ranks=(12, 8), steps=0):
    """PEFT's config of a method; rank, targets and initial values are those of methods that have them,
    `ranks` and `steps` the first and last ranks and the steps of an AdaLoRA."""
    modules = ["c_attn", "c_proj", "c_fc"] if targets == "all-linear" else [targets]
    low_rank = {"target_modules": modules, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    if method in ("lora", "dora"):
        init = True if init == "default" else init
        return LoraConfig(r=rank, lora_alpha=16, use_dora=method == "dora", init_lora_weights=init, **low_rank)
    if method == "vera":
        return VeraConfig(r=rank, **low_rank)
    if method == "adalora":
        return AdaLoraConfig(init_r=ranks[0], target_r=ranks[1], lora_alpha=16, total_step=steps, **low_rank)
    if method == "ia3":
        return IA3Config(task_type="CAUSAL_LM", fan_in_fan_out=True)
    kinds = {"ln_tuning": (LNTuningConfig, {}), "prefix": (PrefixTuningConfig, {"num_virtual_tokens": 20}),
             "prompt_tuning": (PromptTuningConfig, {"num_virtual_tokens": 20})}
    kind, options = kinds[method]
    return kind(task_type="CAUSAL_LM", **options)


def peak_bytes():
    """Peak resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("base")
    p.add_argument("rows")
    p.add_argument("--method", choices=METHODS, default="lora")
    p.add_argument("--rank", type=int, default=8)
    p.add_argument("--init-r", type=int, default=12)
    p.add_argument("--target-r", type=int, default=8)
    p.add_argument("--targets", choices=["c_attn", "all-linear"], default="c_attn")
    p.add_argument("--init-lora-weights", default="default")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--dtype", choices=DTYPES, default="f32")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--device", default="cpu")
    p.add_argument("--autocast", action="store_true")
    p.add_argument("--fit", action="store_true")
    a = p.parse_args()

    torch.manual_seed(0)
    imports = peak_bytes()
    model = AutoModelForCausalLM.from_pretrained(a.base, dtype=DTYPES[a.dtype], attn_implementation="sdpa",
                                                 resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    ranks = (a.init_r, a.target_r)
    peft_config = config(a.method, a.rank, a.targets, a.init_lora_weights, ranks, a.steps)
    model = get_peft_model(model, peft_config).to(a.device)
    if a.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.config.use_cache = False
    model.train()
    step_model = torch.compile(model) if a.compile else model
    trainable = [q for q in model.parameters() if q.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-4, weight_decay=0.01)
    gpu = a.device != "cpu"
    scaler = torch.amp.GradScaler(enabled=gpu and a.dtype == "f16")

    with open(a.rows, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]

    def run(rows):
        """Seconds and losses of all steps of `rows` rows, and the tokens of a step."""
        seconds, losses = [], []
        for step in range(a.steps):
            batch = records[step * rows:(step + 1) * rows]
            ids = torch.tensor([record["input_ids"] for record in batch]).to(a.device)
            labels = torch.tensor([record["labels"] for record in batch]).to(a.device)
            start = time.perf_counter()
            with torch.autocast(a.device, dtype=DTYPES[a.dtype], enabled=(gpu or a.autocast) and a.dtype != "f32"):
                loss = step_model(input_ids=ids, labels=labels).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            scaler.step(optimizer)
            scaler.update()
            if a.method == "adalora":
                model.base_model.update_and_allocate(step)
            optimizer.zero_grad(set_to_none=True)
            # Waits until a device has finished.
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        return seconds, losses, ids.numel()

    rows = a.batch
    while True:
        try:
            seconds, losses, tokens = run(rows)
            break
        except torch.OutOfMemoryError:
            if not a.fit or rows == 1:
                raise
        # Outside of the handler, whose exception holds the tensors of the step.
        rows //= 2
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    print(json.dumps({
        "tokens_per_s": tokens / statistics.median(seconds[1:]),
        "batch": rows,
        "s_per_step": statistics.median(seconds[1:]),
        "peak_bytes": peak_bytes(),
        "import_bytes": imports,
        "losses": losses,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "peft": peft.__version__},
    }))


if __name__ == "__main__":
    main()
