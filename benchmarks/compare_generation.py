"""engraft beside llama.cpp and Transformers: reading prompts and generating, in turn, on this machine's CPU.

    pip install -r benchmarks/requirements.txt
    cargo build --release --bins --examples
    python benchmarks/compare_generation.py [--size small] [--rounds 3] [--prompt 512,1000] [--rows 1,8,32]

Sides are processes of their own that take turns; the table holds medians of tokens/s, and engraft's speed relative to
each side, taken within a round. llama.cpp is the program inside the npm package node-llama-cpp, which is fetched
into --peers; it reads F16 and Q8_0 files of the same weights. With `--adapter auto` a LoRA of rank 16 on all linear
sites is made first and stands beside the base alone.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time

from common import HERE, RELEASE, ROOT, base, job, save, train_command, words, write_rows

LLAMA = "node-llama-cpp@3.22.1"


def speeds(command):
    """What a side prints as its last line."""
    done = subprocess.run(words(command), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words(command))}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peers(folder, source, size):
    """node-llama-cpp and GGUF files of the base, made where they are missing: {type: file}."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "node-llama-cpp").exists():
        # Its own binaries alone: no build from source, no download beyond the package.
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-save", "--prefix", folder, LLAMA], check=True,
                       stdout=sys.stderr)
    files = {}
    for kind in ["f16", "q8_0"]:
        files[kind] = folder / f"{size}-{kind}.gguf"
        if not files[kind].exists():
            subprocess.run(words([sys.executable, HERE / "gguf_base.py", source, files[kind], "--type", kind]),
                           check=True, stdout=sys.stderr)
    return files


def adapter(program, source, folder):
    """A LoRA of rank 16 on all linear sites after a step, so that its B is not zero."""
    made = folder / "rank16" / "adapter"
    if not made.exists():
        rows = write_rows(folder / "rows.jsonl", 1, 64)
        options = [*job(source, rows, 1, 64, 1), "--targets", "all-linear", "--rank", 16]
        subprocess.run(train_command(program, options, folder / "rank16"), check=True, stdout=sys.stderr)
    return made


def first_token(program, source):
    """Seconds from the start of the program to its end with one token, and with 201; peak resident bytes."""
    def run(new):
        command = words([program, "generate", "--base", source, "--input-ids", "15496,612", "--max-new-tokens", new,
                         "--min-new-tokens", new, "--temperature", 0])
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start
    one = statistics.median(run(1) for _ in range(5))
    run(201)
    return one, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="small")
    p.add_argument("--bases", type=pathlib.Path, default=ROOT / "target" / "bases", metavar="FOLDER")
    p.add_argument("--base", type=pathlib.Path, help="a folder with a GPT-2")
    p.add_argument("--peers", type=pathlib.Path, default=ROOT / "target" / "peers", metavar="FOLDER")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--prompt", default="512,1000")
    p.add_argument("--rows", default="1,8,32")
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--adapter", choices=["none", "auto"], default="auto")
    p.add_argument("--bf16", action="store_true",
                   help="engraft and Transformers in BF16 too: the latter is slow where the CPU has no BF16")
    p.add_argument("--json", type=pathlib.Path, metavar="FILE")
    a = p.parse_args()

    source = a.base or base(a.bases, a.size)
    # First of all, while no peer has raised the peak of this process's children.
    seconds, peak = first_token(RELEASE / "engraft-infer", source)
    files = peers(a.peers, source, a.size)
    ours = [RELEASE / "examples" / "decoding", source, "--prompt", a.prompt, "--rows", a.rows, "--new", a.new]
    llama = lambda kind: ["node", HERE / "llama.mjs", files[kind], "--prompt", a.prompt, "--new", a.new, "--threads",
                          os.cpu_count(), "--modules", a.peers]
    hf = [sys.executable, HERE / "generate_peer.py", source, "--prompt", a.prompt, "--rows", a.rows, "--new", a.new]
    sides, best = {"engraft": ours}, "engraft"
    if a.bf16:
        ours, best = [*ours, "--bf16"], "engraft BF16"
        sides[best] = ours
    if a.adapter == "auto":
        sides[f"{best}, LoRA"] = [*ours, "--adapter", adapter(RELEASE / "engraft", source, a.peers)]
    sides |= {"llama.cpp F16": llama("f16"), "llama.cpp Q8_0": llama("q8_0"), "Transformers F32": hf}
    if a.bf16:
        sides["Transformers BF16"] = [*hf, "--dtype", "bf16"]

    rounds = []
    for number in range(a.rounds):
        rounds.append({})
        for side, command in sides.items():
            rounds[-1][side] = speeds(command)
            print(f"round {number}: {side}: {rounds[-1][side]}", flush=True)

    print(f"\n{platform.machine()}, {os.cpu_count()} CPUs; {a.size}; tokens/s, medians of {a.rounds}; in brackets "
          f"{best}'s speed relative to it")
    names = list(rounds[0]["engraft"])
    print(f"{'':20}" + "".join(f"{name:>20}" for name in names))
    for side in sides:
        cells = []
        for name in names:
            if name not in rounds[0][side]:
                cells.append("")
                continue
            speed = statistics.median(r[side][name] for r in rounds)
            ratio = statistics.median(r[best][name] / r[side][name] for r in rounds)
            cells.append(f"{speed:.1f} ({ratio:.2f} x)")
        print(f"{side:20}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\nengraft-infer: {seconds:.2f} s from the shell to its end with one token, peak resident set "
          f"{peak / 2**20:.0f} MiB with 201")
    save(a.json, {"rounds": rounds, "first_token_s": seconds, "peak_bytes": peak})


if __name__ == "__main__":
    main()
