"""What a GPU has to show, in parts that each end on their own: right, fast, why.

    . target/cuda/env.sh && cargo build --release --features cuda --bins --example device_check
    pip install -r benchmarks/requirements.txt
    python benchmarks/gpu.py [right|fast|why|all ..] [--minutes 9] [--sizes small,medium] [--methods lora] [--output FOLDER]

right  `device_check` part by part (every op against the CPU, planned against held memory, golden files, trainings), ops that
       fail once more with a wait after each launch, the default training, then the ops under compute-sanitizer where that
       is installed (`pip install nvidia-cuda-sanitizer-api` will do): memcheck, racecheck, synccheck
fast   products, attention, updates and tokens beside PyTorch; for each size a LoRA r 8 on c_attn beside PEFT, eager and
       compiled, at the largest micro-batch that both can run (small: 8); generation with a LoRA of rank 16 beside
       Transformers with PEFT
why    the predicted time of a step, and kernels by their time where ncu is installed: a step of the first size, two layers
       of medium with what limits each kernel, tokens of medium; then 20 steps of xl
all    all of these, and of fast large and xl, the prefix of 20, bf16, inputs offloaded and the base streamed too

The machine with the GPU needs no Rust and no network: scripts/gpu-kit.sh makes one folder of all that this takes, beside
python with torch, transformers, peft and numpy. Every part is a process of its own with a time limit. What it says is shown
or kept line by line in OUTPUT/gpu.log, what it gave in OUTPUT/gpu.json at once, which later calls add to; the goals with
what was reached end the output. What does not fit into --minutes is named and left out. Memory is the most that the device
says is used, less what was used before, for both sides alike. Libraries of CUDA are also looked for where python has them
(site-packages/nvidia). Exit code 1 when a part fails. `--device cpu --sizes tiny --batch 1 --seq 64` tries the script
itself.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

import gpu_goals
import gpu_profile
from common import HERE, base, events, job, last_line, train_command, write_rows
from gpu_session import Places, Session, Unreadable, installed

PARTS = ["right", "fast", "why", "all"]
# Steps of engraft: enough for the device's clock to settle. PEFT's steps are slower; 16 give a stable median.
STEPS, PEFT_STEPS = 40, 16


def steps_of(output):
    """Speed of a training of ours, from its events."""
    found = events(output)
    speeds = sorted(step["tokens_per_s"] for step in found["step"][2:])
    if not speeds:
        raise Unreadable("it reported fewer than three steps")
    return {"tokens_per_s": speeds[len(speeds) // 2], "losses": [step["loss"] for step in found["step"]],
            "planned_bytes": found["plan"]["peak_bytes"], "micro_batch": found["plan"]["policy"]["micro_batch"]}


def learned(output):
    """First and last evaluation of the default training."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    losses = [event["loss"] for event in lines if event["event"] == "eval"]
    if len(losses) < 2 or losses[-1] > losses[0] / 2:
        raise Unreadable(f"it did not learn: losses {losses}")
    return {"first_loss": losses[0], "last_loss": losses[-1]}


def right(s, a):
    """Right first: a process a part, so that a fault ends no other."""
    program, number = s.places.program("device_check"), "cpu" if a.device == "cpu" else 0
    if not program:
        s.keep("device_check", {"left_out": "not built; it needs --features cuda"})
    for part in ["ops", "memory", "golden", "runs", "codes"] if program else []:
        def files(name):
            return ["--golden", s.places.golden, "--json", s.places.work / f"device_check_{name}.json"]
        done = s.run(f"check {part}", [program, number, part, *files(part)], 15, limit=150, echo=True)
        if part == "ops" and done and "failed" in done:
            s.run("check ops, waiting", [program, number, part, "--wait", *files("waiting")], 15, may_fail=True, limit=60)
    with tempfile.TemporaryDirectory() as folder:
        command = [s.places.program("engraft"), "train", "--device", a.device, "--json", "--output", folder]
        s.run("default training", command, 15, learned, limit=120)
    sanitizer = installed("compute-sanitizer", "usr/local/cuda*/bin/compute-sanitizer", "opt/nvidia/*/compute-sanitizer")
    if not sanitizer or not program or a.device == "cpu":
        s.keep("compute-sanitizer", {"left_out": "not installed" if not sanitizer else "it needs a device"})
        return
    for tool in gpu_profile.SANITIZER_TOOLS:
        beside = ["--small", "--golden", s.places.golden, "--json", s.places.work / "sanitized.json"]
        command = [*gpu_profile.sanitizer(sanitizer, tool), program, number, "ops", *beside]
        s.run(f"compute-sanitizer {tool}", command, 30, gpu_profile.sanitized, limit=150)


def ops(s, a):
    """What no training shows by itself, beside PyTorch."""
    program, number = s.places.program("device_check"), "cpu" if a.device == "cpu" else 0
    if program:
        size = "tiny" if a.device == "cpu" else "medium"
        file = s.places.work / "speed.json"
        command = [program, number, "speed", "--base", base(s.places.bases, size), "--golden", s.places.golden, "--json", file]
        s.run("speed: engraft", command, 40, lambda _: {"speeds": json.loads(file.read_text())["speeds"]}, limit=120,
              echo=True)
    small = ["--small"] if a.device == "cpu" else []
    s.run("speed: PyTorch", [sys.executable, HERE / "torch_ops.py", "--device", a.device, *small], 30,
          lambda text: {"figures": json.loads(last_line(text))}, may_fail=True, limit=90)


def options_of(a, source, rows, batch, steps, method="lora", kind="f16"):
    """Options of a training of ours."""
    adapter = ["--rank", 8, "--alpha", 16] if method == "lora" else []
    return [*job(source, rows, batch, a.seq, steps), "--method", method, "--device", a.device, "--precision", kind,
            "--memory", "auto", *adapter]


def largest_batch(s, a, config):
    """The largest power of two of rows that PEFT's eager step should have memory for, from the bytes a row takes there: 36 c
    FP16 numbers a token and layer, 14 bytes a logit. PEFT halves it where that was too much."""
    total = s.device.ask("memory.total")
    if not total.isdigit():
        return 8
    row = a.seq * (2 * 36 * config["n_embd"] * config["n_layer"] + 14 * config["vocab_size"])
    rows = max(1, int(0.9 * int(total) * 2**20 / row))
    return 1 << (rows.bit_length() - 1)


def training(s, a, size, folder, everything):
    """An adapter beside PEFT; where everything is asked for, the prefix, bf16 and what moves too."""
    source = base(s.places.bases, size)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    wanted = a.batch or (8 if size == "small" else largest_batch(s, a, config))
    rows = write_rows(folder / "rows.jsonl", wanted * STEPS, a.seq)
    types = ["f32"] if a.device == "cpu" else ["f16", "bf16"] if everything else ["f16"]
    engraft = s.places.program("engraft")
    for method in a.methods.split(",") if a.methods else ["lora", "prefix"] if everything else ["lora"]:
        for kind in types:
            name = f"{size} {method} {kind}"
            batch = wanted

            def peer(how, *more):
                command = [sys.executable, HERE / "peft_step.py", source, rows, "--batch", batch, "--steps", PEFT_STEPS,
                           "--method", method, "--dtype", kind, "--device", a.device, "--fit", *more]
                return s.run(f"{name}: PEFT{how}", command, 50 if more else 25, lambda text: json.loads(last_line(text)),
                             may_fail=True, limit=150)
            eager = peer("")
            if eager and "batch" in eager:
                batch = eager["batch"]
            options = options_of(a, source, rows, batch, STEPS, method, kind)
            s.run(f"{name}: engraft", train_command(engraft, options, folder / name.replace(" ", "-")), 15, steps_of)
            peer(" compiled", "--compile")
            moving = {"offloading": ["--offload-inputs", "--offload-optimizer"], "streaming": ["--stream-base", "on"]}
            for how, more in moving.items() if everything and method == "lora" and kind == types[0] else []:
                command = train_command(engraft, [*options, *more], folder / how)
                s.run(f"{name}: engraft, {how}", command, 15, steps_of)


def sample_of(output):
    """Speed of a sample after its first token, as the program that made it tells."""
    samples = [event for event in map(json.loads, output.splitlines()) if "tokens_per_s" in event]
    return {"tokens_per_s": samples[-1]["tokens_per_s"]}


def adapter_of(s, a, size, folder):
    """A LoRA of rank 16 on all sites of a size, after one step; None where it could not be trained."""
    rows = write_rows(folder / "short.jsonl", 1, 64)
    options = [*job(base(s.places.bases, size), rows, 1, 64, 1), "--targets", "all-linear", "--rank", 16, "--device", a.device]
    made = s.run(f"{size} adapter", train_command(s.places.program("engraft"), options, folder / "rank16"), 15)
    return folder / "rank16" / "adapter" if made and not made.keys() & {"failed", "left_out"} else None


def sampling(s, a, size, adapter, new):
    """The command of one sample of `new` tokens."""
    return [s.places.program("engraft-infer"), "generate", "--base", base(s.places.bases, size), "--adapter", adapter,
            "--device", a.device, "--json", "--input-ids", "15496,612", "--max-new-tokens", new, "--min-new-tokens", new,
            "--temperature", 0]


def decoding(s, a, size, folder):
    """One sample of 256 tokens with a LoRA of rank 16 on all sites, beside Transformers with PEFT."""
    adapter = adapter_of(s, a, size, folder)
    if not adapter:
        return
    s.run(f"{size} decoding: engraft", sampling(s, a, size, adapter, 256), 15, sample_of)
    command = [sys.executable, HERE / "generate_peer.py", base(s.places.bases, size), "--adapter", adapter, "--device",
               a.device, "--dtype", "f32" if a.device == "cpu" else "f16", "--prompt", 32, "--rows", 1, "--new", 128]
    s.run(f"{size} decoding: PEFT", command, 40,
          lambda text: {"tokens_per_s": json.loads(last_line(text))["rows 1"]}, may_fail=True, limit=120)


def fast(s, a, sizes, everything):
    """Speeds beside the peers."""
    ops(s, a)
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=s.places.work) as name:
            training(s, a, size, pathlib.Path(name), everything)
        if size != "medium" and not everything:
            continue
        with tempfile.TemporaryDirectory(dir=s.places.work) as name:
            decoding(s, a, size, pathlib.Path(name))


def why(s, a, sizes):
    """Predicted times, kernels by their time, and a large training."""
    engraft, first = s.places.program("engraft"), sizes[0]
    for size in sizes if a.device != "cpu" else []:
        rows = a.batch or 8
        options = ["--base", base(s.places.bases, size), "--data", write_rows(s.places.work / "one.jsonl", rows, a.seq),
                   "--batch", rows, "--seq-len", a.seq, "--no-pack", "--method", "lora", "--rank", 8, "--alpha", 16,
                   "--device", "cuda", "--precision", "f16", "--memory", "100GiB", "--json"]
        s.run(f"{size} predicted", [engraft, "plan", *options], 5, gpu_profile.predicted, may_fail=True)
    ncu = installed("ncu", "usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
    if not ncu or a.device == "cpu":
        s.keep("ncu", {"left_out": "not installed" if not ncu else "it needs a device"})
    else:
        with tempfile.TemporaryDirectory(dir=s.places.work) as name:
            folder = pathlib.Path(name)
            rows = write_rows(folder / "rows.jsonl", 16, a.seq)

            def steps(size):
                options = options_of(a, base(s.places.bases, size), rows, a.batch or 8, 2)
                return train_command(engraft, options, folder / size)
            s.run(f"{first} kernels", [*gpu_profile.durations(ncu), *steps(first)], 45, gpu_profile.times, may_fail=True,
                  limit=150)
            s.run("medium-2 limits", [*gpu_profile.sections(ncu), *steps("medium-2")], 45, gpu_profile.limits, may_fail=True,
                  limit=150)
            adapter = adapter_of(s, a, "medium", folder)
            if adapter:
                s.run("medium token kernels", [*gpu_profile.durations(ncu), *sampling(s, a, "medium", adapter, 4)], 45,
                      gpu_profile.times, may_fail=True, limit=120)
    large = "xl" if a.device != "cpu" else first
    with tempfile.TemporaryDirectory(dir=s.places.work) as name:
        folder, batch = pathlib.Path(name), a.batch or 4
        kind = "f32" if a.device == "cpu" else "f16"
        rows = write_rows(folder / "rows.jsonl", 20 * batch, a.seq)
        options = options_of(a, base(s.places.bases, large), rows, batch, 20, kind=kind)
        s.run(f"{large} lora {kind}, {batch} rows: engraft", train_command(engraft, options, folder / "run"), 45, steps_of)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", metavar="PART", help="right, fast, why or all; all where none is named")
    p.add_argument("--programs", type=pathlib.Path, metavar="FOLDER")
    p.add_argument("--bases", type=pathlib.Path, metavar="FOLDER")
    p.add_argument("--output", type=pathlib.Path, metavar="FOLDER")
    p.add_argument("--device", default="cuda")
    p.add_argument("--sizes", help="by default small,medium, of all the parts small,medium,large,xl")
    p.add_argument("--methods", help="by default lora, of all the parts lora,prefix")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--patience", type=float, default=1, help="factor of every part's time limit, for the stand-in driver")
    p.add_argument("--batch", type=int, help="rows of a step; by default 8 of small, the most that PEFT can run of others")
    p.add_argument("--seq", type=int, default=1024)
    a = p.parse_args()
    parts = a.parts or ["all"]
    for part in parts:
        if part not in PARTS:
            p.error(f"{part}: is no part; give some of {', '.join(PARTS)}")
    everything = "all" in parts
    sizes = (a.sizes or ("small,medium,large,xl" if everything else "small,medium")).split(",")

    places = Places(a.programs, a.bases, a.output)
    places.work.mkdir(parents=True, exist_ok=True)
    if not places.program("engraft"):
        p.error(f"{places.programs}: has no program engraft; name the folder of the programs with --programs")
    s = Session(places, a.minutes, a.patience)
    s.keep("device", {"name": s.device.ask("name") or a.device, "driver": s.device.ask("driver_version"),
                      "date": time.strftime("%Y-%m-%d")})
    runs = {"right": lambda: right(s, a), "fast": lambda: fast(s, a, sizes, everything), "why": lambda: why(s, a, sizes)}
    for part, run in runs.items():
        if everything or part in parts:
            try:
                run()
            except Exception as cause:  # of the script itself: the other parts and the table still come
                s.failures.append(f"{part}: {cause!r}")
                s.keep(part, {"failed": repr(cause)})
    gpu_goals.utilisation(s.results, places.bases, a)
    s.results["goals"] = gpu_goals.verdicts(s.results)
    s.write()
    gpu_goals.table(s.results)
    for failure in s.failures:
        print(f"FAILED {failure}")
    sys.exit(1 if s.failures else 0)


if __name__ == "__main__":
    main()
