"""Checks and measures a GPU in one command: correctness first, then speed, compared with PEFT on the same device.

    . target/cuda/env.sh && cargo build --release --features cuda --bins --example device_check
    pip install -r benchmarks/requirements.txt
    python benchmarks/gpu.py [--programs FOLDER] [--minutes 9] [--sizes small,medium,large,xl] [--output FOLDER]

The machine with the GPU needs the programs, python with torch, transformers and peft, and this folder, no Rust. One after the other:
`device_check` (every op against the CPU, golden files, trainings, planned against held memory), its ops once more under
compute-sanitizer where that is installed (`pip install nvidia-cuda-sanitizer-api` will do), a default training, products,
attention and updates compared with PyTorch, tokens with their launches recorded and one by one, then for each size a LoRA r 8 on
c_attn and a prefix of 20 compared with PEFT, eager and compiled, f16 and bf16, with inputs offloaded and the base streamed too,
and generation with a LoRA of rank 16 compared with Transformers with PEFT. Parts that
do not fit into --minutes are named and left out, the largest sizes first. Memory is the most that the device reports as
used, less the memory used before, for both sides alike. Results go to FOLDER/gpu.json after each part; a table ends the
output. Exit code 1 when a check fails. `--device cpu --sizes tiny --batch 1 --seq 64` tries the script itself.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from common import HERE, RELEASE, ROOT, base, events, job, last_line, train_command, words, write_rows

BATCH = {"small": 8, "medium": 8, "large": 4, "xl": 2}


class Device:
    """Memory and name of the device from nvidia-smi; empty without a device."""

    def __init__(self):
        self.here = shutil.which("nvidia-smi") is not None

    def ask(self, field):
        """One field of the first device."""
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() if self.here else ""

    @contextlib.contextmanager
    def peak(self, result):
        """Has the most MiB used above what is used now written to result["device_mib"]."""
        if not self.here:
            yield
            return
        before, most, over = int(self.ask("memory.used")), 0, threading.Event()

        def watch():
            nonlocal most
            while not over.wait(0.05):
                most = max(most, int(self.ask("memory.used")) - before)
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            result["device_mib"] = most


class Session:
    """Runs parts one after another within the time limit, and keeps their results."""

    def __init__(self, a):
        self.a, self.device, self.results, self.failures = a, Device(), {}, []
        self.end = time.monotonic() + 60 * a.minutes

    def run(self, name, command, needs, read=None, may_fail=False):
        """Runs a command if `needs` seconds are left; `read` makes a result of its standard output."""
        left = self.end - time.monotonic()
        if left < needs:
            self.keep(name, {"left_out": f"needs {needs} s, {left:.0f} were left"})
            return None
        result, start = {}, time.monotonic()
        try:
            with self.device.peak(result):
                done = subprocess.run(words(command), capture_output=True, text=True, timeout=left, cwd=ROOT)
            if done.returncode == 0:
                result |= read(done.stdout) if read else {}
            else:
                result["failed"] = f"exit code {done.returncode}: {last_line(done.stderr) or last_line(done.stdout)}"
        except subprocess.TimeoutExpired:
            result["left_out"] = f"took longer than the {left:.0f} s that were left"
        if "failed" in result and not may_fail:
            self.failures.append(f"{name}: {result['failed']}")
        result["seconds"] = round(time.monotonic() - start, 3)
        self.keep(name, result)
        return result

    def keep(self, name, result):
        """Writes all results so far, and a line."""
        self.results[name] = result
        (self.a.output / "gpu.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        shown = {key: value for key, value in result.items() if not isinstance(value, (list, dict))}
        print(f"{name}: {shown}", flush=True)


def steps_of(output):
    """Speed of a training of ours, from its events."""
    found = events(output)
    speeds = sorted(step["tokens_per_s"] for step in found["step"][2:])
    return {"tokens_per_s": speeds[len(speeds) // 2], "losses": [step["loss"] for step in found["step"]],
            "planned_bytes": found["plan"]["peak_bytes"]}


def learned(output):
    """First and last evaluation of the default training."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    losses = [event["loss"] for event in lines if event["event"] == "eval"]
    if len(losses) < 2 or losses[-1] > losses[0] / 2:
        return {"failed": f"it did not learn: losses {losses}"}
    return {"first_loss": losses[0], "last_loss": losses[-1]}


def check(s, programs, device):
    """The checks: every op, golden files, trainings, memory."""
    file = s.a.output / "device_check.json"
    number = "cpu" if device == "cpu" else 0
    s.run("device_check", [programs / "examples" / "device_check", number, "--json", file], 60)
    wheels = [pathlib.Path(folder) / "nvidia/cu13/compute-sanitizer/compute-sanitizer" for folder in sys.path]
    sanitizer = shutil.which("compute-sanitizer") or next((file for file in wheels if os.access(file, os.X_OK)), None)
    if sanitizer and device != "cpu":
        s.run("compute-sanitizer", [sanitizer, "--error-exitcode", 9, programs / "examples" / "device_check", number,
                                    "ops", "--small", "--json", s.a.output / "sanitized.json"], 120)
    else:
        s.keep("compute-sanitizer", {"left_out": "not installed"})
    with tempfile.TemporaryDirectory() as folder:
        s.run("default training", [programs / "engraft", "train", "--device", device, "--json", "--output", folder], 30,
              learned)


def ops(s, programs, device):
    """Speeds that trainings do not show separately, compared with PyTorch."""
    sizes = s.a.sizes.split(",")
    source = base(s.a.bases, "medium" if "medium" in sizes else sizes[0])
    file, number = s.a.output / "speed.json", "cpu" if device == "cpu" else 0
    s.run("speed: engraft", [programs / "examples" / "device_check", number, "speed", "--base", source, "--json", file], 40,
          lambda _: {"speeds": json.loads(file.read_text())["speeds"]})
    small = ["--small"] if device == "cpu" else []
    s.run("speed: PyTorch", [sys.executable, HERE / "torch_ops.py", "--device", device, *small], 30,
          lambda text: {"figures": json.loads(last_line(text))}, may_fail=True)


def training(s, programs, device, size, source, folder):
    """Speed and memory of training a LoRA and a prefix, compared with PEFT."""
    batch = s.a.batch or BATCH.get(size, 4)
    steps = 8
    rows = write_rows(folder / "rows.jsonl", batch * steps, s.a.seq)
    types = ["f32"] if device == "cpu" else ["f16", "bf16"]
    for method in ["lora", "prefix"]:
        for kind in types:
            name = f"{size} {method} {kind}"
            options = [*job(source, rows, batch, s.a.seq, steps), "--method", method, "--device", device, "--precision",
                       kind, "--memory", "auto"]
            options += ["--rank", 8, "--alpha", 16] if method == "lora" else []
            output = folder / name.replace(" ", "-")
            s.run(f"{name}: engraft", train_command(programs / "engraft", options, output), 20, steps_of)
            moving = {"offloading": ["--offload-inputs", "--offload-optimizer"], "streaming": ["--stream-base", "on"]}
            for how, more in moving.items() if method == "lora" and kind == types[0] else []:
                command = train_command(programs / "engraft", [*options, *more], folder / how)
                s.run(f"{name}: engraft, {how}", command, 20, steps_of)
            for how in [[], ["--compile"]]:
                command = [sys.executable, HERE / "peft_step.py", source, rows, "--batch", batch, "--steps", steps,
                           "--method", method, "--dtype", kind, "--device", device, *how]
                s.run(f"{name}: PEFT{' compiled' if how else ''}", command, 90 if how else 30,
                      lambda text: json.loads(last_line(text)), may_fail=True)


def decoding(s, programs, device, size, source, folder):
    """One sample with a LoRA of rank 16 on all sites: a run of 257 tokens less one of 1 token."""
    rows = write_rows(folder / "short.jsonl", 1, 64)
    options = [*job(source, rows, 1, 64, 1), "--targets", "all-linear", "--rank", 16, "--device", device]
    made = s.run(f"{size} adapter", train_command(programs / "engraft", options, folder / "rank16"), 20)
    if made is None or "failed" in made:
        return
    adapter, seconds = folder / "rank16" / "adapter", {}
    for new in [1, 257]:
        command = [programs / "engraft-infer", "generate", "--base", source, "--adapter", adapter, "--device", device,
                   "--input-ids", "15496,612", "--max-new-tokens", new, "--min-new-tokens", new, "--temperature", 0]
        result = s.run(f"{size} decoding {new}: engraft", command, 20)
        seconds[new] = (result or {}).get("seconds")
    if None not in seconds.values():
        s.keep(f"{size} decoding: engraft", {"tokens_per_s": 256 / max(seconds[257] - seconds[1], 1e-3)})
    command = [sys.executable, HERE / "generate_peer.py", source, "--adapter", adapter, "--device", device, "--dtype",
               "f32" if device == "cpu" else "f16", "--prompt", 32, "--rows", 1, "--new", 128]
    s.run(f"{size} decoding: PEFT", command, 40,
          lambda text: {"tokens_per_s": json.loads(last_line(text))["rows 1"]}, may_fail=True)


def flops(config, seq):
    """FLOP a token of a training step: 4 a weight of blocks and head, forward and back through frozen weights, and 7
    products of attention a pair of tokens."""
    width, layers = config["n_embd"], config["n_layer"]
    weights = layers * 12 * width * width + config["vocab_size"] * width
    return 4 * weights + 7 * layers * width * (seq + 1)


def utilisation(s, device):
    """Shares of the measured speed of products that trainings reach."""
    speeds = s.results.get("speed: engraft", {}).get("speeds", [])
    ceilings = {speed["what"].rsplit(", ", 1)[1].lower(): 1e12 * speed["value"]
                for speed in speeds if speed["what"].startswith("frozen product")}
    for name, result in s.results.items():
        if device == "cpu" or not name.endswith(": engraft") or "losses" not in result:
            continue
        size, _, kind = name.split(": ")[0].split(" ")
        config = json.loads((s.a.bases / size / "config.json").read_text(encoding="utf-8"))
        if ceilings.get(kind):
            result["utilisation"] = round(result["tokens_per_s"] * flops(config, s.a.seq) / ceilings[kind], 3)


def table(results):
    """Speeds and memory, with ratios to ours."""
    for speed in results.get("speed: engraft", {}).get("speeds", []):
        print(f"{speed['what']:72} {speed['value']:10.3f} {speed['unit']}")
    for what, (value, unit) in results.get("speed: PyTorch", {}).get("figures", {}).items():
        print(f"{'PyTorch: ' + what:72} {value:10.3f} {unit}")
    print(f"\n{'':24} {'tokens/s':>10} {'MiB':>8}   engraft over it: speed, memory")
    for name, result in results.items():
        if "tokens_per_s" not in result:
            continue
        job_, side = name.split(": ")
        ours = results.get(f"{job_}: engraft", {})
        ratio = ours.get("tokens_per_s", 0) / result["tokens_per_s"]
        mib, own = result.get("device_mib"), ours.get("device_mib")
        share = f"{own / mib:.2f} x" if own and mib else ""
        used = f"  {result['utilisation']:.0%} of the ceiling" if "utilisation" in result else ""
        print(f"{job_ + ': ' + side:40} {result['tokens_per_s']:10.0f} {mib or '':>8}   {ratio:.2f} x  {share}{used}")
    for name, result in results.items():
        if "left_out" in result or "failed" in result:
            print(f"{name}: {result.get('failed') or 'left out, ' + result['left_out']}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--programs", type=pathlib.Path, default=RELEASE, metavar="FOLDER")
    p.add_argument("--bases", type=pathlib.Path, default=ROOT / "target" / "bases", metavar="FOLDER")
    p.add_argument("--output", type=pathlib.Path, default=ROOT / "target" / "gpu", metavar="FOLDER")
    p.add_argument("--device", default="cuda")
    p.add_argument("--sizes", default="small,medium,large,xl")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--batch", type=int, help="rows of a step; by default 8 of small and medium, 4 of large, 2 of xl")
    p.add_argument("--seq", type=int, default=1024)
    a = p.parse_args()

    a.output.mkdir(parents=True, exist_ok=True)
    programs, s = a.programs.resolve(), Session(a)
    s.keep("device", {"name": s.device.ask("name") or a.device, "driver": s.device.ask("driver_version"),
                      "date": time.strftime("%Y-%m-%d")})
    if (programs / "examples" / "device_check").exists():
        check(s, programs, a.device)
        ops(s, programs, a.device)
    else:
        s.keep("device_check", {"left_out": "not built; it needs --features cuda"})
    for size in a.sizes.split(","):
        source = base(a.bases, size)
        with tempfile.TemporaryDirectory() as folder:
            training(s, programs, a.device, size, source, pathlib.Path(folder))
            decoding(s, programs, a.device, size, source, pathlib.Path(folder))
    utilisation(s, a.device)
    (a.output / "gpu.json").write_text(json.dumps(s.results, indent=1) + "\n", encoding="utf-8")
    table(s.results)
    for failure in s.failures:
        print(f"FAILED {failure}")
    sys.exit(1 if s.failures else 0)


if __name__ == "__main__":
    main()
