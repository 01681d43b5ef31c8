"""What a GPU has to show, in parts that each end on their own: right, fast, why.

    . target/cuda/env.sh && cargo build --release --features cuda --bins --example device_check
    pip install -r benchmarks/requirements.txt
    python benchmarks/gpu.py [right|fast|why|all ..] [--programs FOLDER] [--minutes 9] [--sizes small,medium] [--output FOLDER]

right  `device_check` part by part (every op against the CPU, planned against held memory, golden files, trainings), ops that
       fail once more with a wait after each launch, the ops under compute-sanitizer where that is installed
       (`pip install nvidia-cuda-sanitizer-api` will do), and the default training
fast   for each size a LoRA r 8 on c_attn beside PEFT, eager and compiled, and generation with a LoRA of rank 16 beside
       Transformers with PEFT
why    products, attention and updates beside PyTorch, kernels of a step of the first size by their time (ncu, where that is
       installed), 20 steps of xl
all    right, why, and of fast the prefix of 20, bf16, inputs offloaded and the base streamed too

The machine with the GPU needs the programs, python with torch, transformers and peft, and this folder with tests/golden, no
Rust. Every part is a process of its own with a time limit; its whole output goes to FOLDER/logs, what it gave to
FOLDER/gpu.json at once, and a table ends the output. What does not fit into --minutes is named and left out. Memory is the
most that the device says is used, less what was used before, for both sides alike. Libraries of CUDA are also looked for
where python has them (site-packages/nvidia). Exit code 1 when a check fails. `--device cpu --sizes tiny --batch 1 --seq 64`
tries the script itself.
"""

import argparse
import contextlib
import csv
import json
import os
import pathlib
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time

from common import HERE, RELEASE, ROOT, base, events, job, last_line, train_command, words, write_rows

BATCH = {"small": 8, "medium": 8, "large": 4, "xl": 2}
PARTS = ["right", "fast", "why", "all"]
# Steps of engraft: enough for the device's clock to settle. PEFT's steps are slower; 16 give a stable median.
STEPS, PEFT_STEPS = 40, 16


def python_libraries():
    """Folders of CUDA's libraries among the packages of this Python."""
    roots = [pathlib.Path(folder) for folder in [*sys.path, *site.getsitepackages(), site.getusersitepackages()]]
    found = [folder for root in roots for folder in sorted((root / "nvidia").glob("*/lib"))]
    return list(dict.fromkeys(str(folder) for folder in found))


def environment():
    """The environment of the programs, which find these libraries after those of the system's own paths."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([*folders, *python_libraries()])}


def installed(name, *patterns):
    """A program in PATH, among this Python's packages or where one of the patterns says."""
    packages = [path for folder in sys.path for path in pathlib.Path(folder).glob(f"nvidia/*/*/{name}")]
    elsewhere = [path for pattern in patterns for path in sorted(pathlib.Path("/").glob(pattern), reverse=True)]
    return shutil.which(name) or next((str(path) for path in [*packages, *elsewhere] if os.access(path, os.X_OK)), None)


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
        self.a, self.device, self.failures = a, Device(), []
        before = a.output / "gpu.json"
        self.results = json.loads(before.read_text(encoding="utf-8")) if before.exists() else {}
        self.end = time.monotonic() + 60 * a.minutes

    def run(self, name, command, needs, read=None, may_fail=False, limit=None):
        """Runs a command if `needs` seconds are left, `limit` seconds at most; `read` makes a result of its standard output."""
        left = self.end - time.monotonic()
        if left < needs:
            self.keep(name, {"left_out": f"needs {needs} s, {left:.0f} were left"})
            return None
        limit = min(left, limit or max(120, 4 * needs))
        result, start = {}, time.monotonic()
        log = self.a.output / "logs" / (name.replace(" ", "-").replace(":", "") + ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.device.peak(result), open(log, "w", encoding="utf-8") as errors:
                done = subprocess.run(words(command), stdout=subprocess.PIPE, stderr=errors, text=True, timeout=limit,
                                      cwd=ROOT, env=environment())
            output = done.stdout
            if done.returncode == 0:
                try:
                    result |= read(output) if read else {}
                except (KeyError, IndexError, ValueError) as cause:
                    result["failed"] = f"its output cannot be read: {cause!r}"
            else:
                result["failed"] = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
            result["failed"] = f"took longer than {limit:.0f} s"
        with open(log, "a", encoding="utf-8") as file:
            file.write(output)
        if "failed" in result:
            said = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
            wrong = [line for line in said if "BROKEN" in line or "FAILED" in line or line.startswith("error")]
            result["failed"] += ": " + " | ".join((wrong or said)[-3:])
            result["log"] = str(log)
            if not may_fail:
                self.failures.append(f"{name}: {result['failed']}")
        result["seconds"] = round(time.monotonic() - start, 3)
        self.keep(name, result)
        return result

    def keep(self, name, result):
        """Writes all results so far, and a line."""
        self.results[name] = result
        self.write()
        shown = {key: value for key, value in result.items() if not isinstance(value, (list, dict))}
        print(f"{name}: {shown}", flush=True)


    def write(self):
        """Writes all results."""
        (self.a.output / "gpu.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


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
    """Right first: a process a part, so that a fault ends no other."""
    number, program = "cpu" if device == "cpu" else 0, programs / "examples" / "device_check"
    golden = ["--golden", ROOT / "tests" / "golden"]
    if not program.exists():
        s.keep("device_check", {"left_out": "not built; it needs --features cuda"})
    for part in ["ops", "memory", "golden", "runs"] if program.exists() else []:
        file = s.a.output / f"device_check_{part}.json"
        done = s.run(f"check {part}", [program, number, part, *golden, "--json", file], 20, limit=180)
        if part == "ops" and done and "failed" in done:
            s.run("check ops, waiting", [program, number, part, "--wait", "--json", s.a.output / "waiting.json"], 20,
                  may_fail=True)
    sanitizer = installed("compute-sanitizer", "usr/local/cuda*/bin/compute-sanitizer")
    if sanitizer and program.exists() and device != "cpu":
        s.run("compute-sanitizer", [sanitizer, "--error-exitcode", 9, program, number, "ops", "--small", "--json",
                                    s.a.output / "sanitized.json"], 60, limit=240)
    else:
        s.keep("compute-sanitizer", {"left_out": "not installed"})
    with tempfile.TemporaryDirectory() as folder:
        s.run("default training", [programs / "engraft", "train", "--device", device, "--json", "--output", folder], 30,
              learned, limit=300)


def ops(s, programs, device):
    """What no training shows by itself, beside PyTorch."""
    program = programs / "examples" / "device_check"
    if program.exists():
        sizes = s.a.sizes.split(",")
        source = base(s.a.bases, "medium" if "medium" in sizes else sizes[0])
        file, number = s.a.output / "speed.json", "cpu" if device == "cpu" else 0
        s.run("speed: engraft", [program, number, "speed", "--base", source, "--json", file], 40,
              lambda _: {"speeds": json.loads(file.read_text())["speeds"]})
    small = ["--small"] if device == "cpu" else []
    s.run("speed: PyTorch", [sys.executable, HERE / "torch_ops.py", "--device", device, *small], 30,
          lambda text: {"figures": json.loads(last_line(text))}, may_fail=True)


def lora_run(s, programs, device, size, source, folder, steps):
    """A training of ours with a LoRA of rank 8, as a command."""
    batch = s.a.batch or BATCH.get(size, 4)
    rows = write_rows(folder / "rows.jsonl", batch * steps, s.a.seq)
    options = [*job(source, rows, batch, s.a.seq, steps), "--method", "lora", "--device", device, "--precision",
               "f32" if device == "cpu" else "f16", "--memory", "auto", "--rank", 8, "--alpha", 16]
    return train_command(programs / "engraft", options, folder / "run")


def seconds_of(text):
    """Milliseconds of each kernel, summed by name, from the CSV that ncu prints."""
    lines = text.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith('"ID"'))
    sums = {}
    for row in csv.DictReader(lines[begin:]):
        if row.get("Metric Name") == "gpu__time_duration.sum":
            scale = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0}
            time_ms = float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]]
            count, all_ms = sums.get(row["Kernel Name"], (0, 0.0))
            sums[row["Kernel Name"]] = (count + 1, all_ms + time_ms)
    largest = sorted(sums.items(), key=lambda item: -item[1][1])
    return {"kernels": {name: {"launches": count, "ms": round(ms, 3)} for name, (count, ms) in largest}}


def why(s, programs, device):
    """Kernels by their time, and a large training."""
    ops(s, programs, device)
    sizes = s.a.sizes.split(",")
    ncu = installed("ncu", "usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if ncu and device != "cpu":
            command = lora_run(s, programs, device, sizes[0], base(s.a.bases, sizes[0]), folder, 2)
            s.run(f"{sizes[0]} kernels", [ncu, "--csv", "--metrics", "gpu__time_duration.sum", *command], 60, seconds_of,
                  may_fail=True, limit=180)
        else:
            s.keep(f"{sizes[0]} kernels", {"left_out": "ncu is not installed"})
    large = "xl" if device != "cpu" else sizes[0]
    with tempfile.TemporaryDirectory() as name:
        command = lora_run(s, programs, device, large, base(s.a.bases, large), pathlib.Path(name), 20)
        s.run(f"{large} lora {'f32' if device == 'cpu' else 'f16'}: engraft, 20 steps", command, 60, steps_of)


def training(s, programs, device, size, source, folder, everything):
    """LoRA beside PEFT; where everything is asked for, the prefix, bf16 and what moves too."""
    batch = s.a.batch or BATCH.get(size, 4)
    rows = write_rows(folder / "rows.jsonl", batch * STEPS, s.a.seq)
    types = ["f32"] if device == "cpu" else ["f16", "bf16"] if everything else ["f16"]
    for method in ["lora", "prefix"] if everything else ["lora"]:
        for kind in types:
            name = f"{size} {method} {kind}"
            options = [*job(source, rows, batch, s.a.seq, STEPS), "--method", method, "--device", device, "--precision",
                       kind, "--memory", "auto"]
            options += ["--rank", 8, "--alpha", 16] if method == "lora" else []
            output = folder / name.replace(" ", "-")
            s.run(f"{name}: engraft", train_command(programs / "engraft", options, output), 20, steps_of)
            moving = {"offloading": ["--offload-inputs", "--offload-optimizer"], "streaming": ["--stream-base", "on"]}
            for how, more in moving.items() if everything and method == "lora" and kind == types[0] else []:
                command = train_command(programs / "engraft", [*options, *more], folder / how)
                s.run(f"{name}: engraft, {how}", command, 20, steps_of)
            for how in [[], ["--compile"]]:
                command = [sys.executable, HERE / "peft_step.py", source, rows, "--batch", batch, "--steps", PEFT_STEPS,
                           "--method", method, "--dtype", kind, "--device", device, *how]
                s.run(f"{name}: PEFT{' compiled' if how else ''}", command, 60 if how else 30,
                      lambda text: json.loads(last_line(text)), may_fail=True, limit=240)


def sample_of(output):
    """Speed of a sample after its first token, as the program that made it tells."""
    samples = [event for event in map(json.loads, output.splitlines()) if "tokens_per_s" in event]
    return {"tokens_per_s": samples[-1]["tokens_per_s"]}


def decoding(s, programs, device, size, source, folder):
    """One sample of 256 tokens with a LoRA of rank 16 on all sites."""
    rows = write_rows(folder / "short.jsonl", 1, 64)
    options = [*job(source, rows, 1, 64, 1), "--targets", "all-linear", "--rank", 16, "--device", device]
    made = s.run(f"{size} adapter", train_command(programs / "engraft", options, folder / "rank16"), 20)
    if made is None or "failed" in made:
        return
    adapter = folder / "rank16" / "adapter"
    command = [programs / "engraft-infer", "generate", "--base", source, "--adapter", adapter, "--device", device, "--json",
               "--input-ids", "15496,612", "--max-new-tokens", 256, "--min-new-tokens", 256, "--temperature", 0]
    s.run(f"{size} decoding: engraft", command, 20, sample_of)
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
        if device == "cpu" or ": engraft" not in name or "losses" not in result:
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
    for name, result in results.items():
        for kernel, times in list(result.get("kernels", {}).items())[:20]:
            print(f"{name}: {kernel[:60]:60} {times['launches']:6} launches {times['ms']:10.3f} ms")
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
    p.add_argument("parts", nargs="*", metavar="PART", help="right, fast, why or all; all where none is named")
    p.add_argument("--programs", type=pathlib.Path, default=RELEASE, metavar="FOLDER")
    p.add_argument("--bases", type=pathlib.Path, default=ROOT / "target" / "bases", metavar="FOLDER")
    p.add_argument("--output", type=pathlib.Path, default=ROOT / "target" / "gpu", metavar="FOLDER")
    p.add_argument("--device", default="cuda")
    p.add_argument("--sizes", help="by default small,medium, of all the parts small,medium,large,xl")
    p.add_argument("--minutes", type=float, default=9)
    p.add_argument("--batch", type=int, help="rows of a step; by default 8 of small and medium, 4 of large, 2 of xl")
    p.add_argument("--seq", type=int, default=1024)
    a = p.parse_args()
    parts = a.parts or ["all"]
    for part in parts:
        if part not in PARTS:
            p.error(f"{part}: is no part; give some of {', '.join(PARTS)}")
    everything = "all" in parts
    a.sizes = a.sizes or ("small,medium,large,xl" if everything else "small,medium")
    wants = lambda part: everything or part in parts

    # What an earlier call found stays.
    a.output = a.output.resolve()
    a.output.mkdir(parents=True, exist_ok=True)
    programs, s = a.programs.resolve(), Session(a)
    s.keep("device", {"name": s.device.ask("name") or a.device, "driver": s.device.ask("driver_version"),
                      "date": time.strftime("%Y-%m-%d")})
    if wants("right"):
        check(s, programs, a.device)
    if wants("why"):
        why(s, programs, a.device)
    for size in a.sizes.split(",") if wants("fast") else []:
        source = base(a.bases, size)
        with tempfile.TemporaryDirectory() as folder:
            training(s, programs, a.device, size, source, pathlib.Path(folder), everything)
            decoding(s, programs, a.device, size, source, pathlib.Path(folder))
    utilisation(s, a.device)
    s.write()
    table(s.results)
    for failure in s.failures:
        print(f"FAILED {failure}")
    sys.exit(1 if s.failures else 0)


if __name__ == "__main__":
    main()
