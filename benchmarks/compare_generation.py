"""Compares engraft, llama.cpp and Transformers on this machine's CPU: reading prompts and generating.

    pip install -r benchmarks/requirements.txt
    cargo build --release --bins --examples
    python benchmarks/compare_generation.py [--size small] [--rounds 3] [--prompt 512,1000] [--rows 1,8,32]

Each side is a process; a round runs them one after another. The table holds medians of tokens/s over the
rounds and, in brackets, engraft's speed divided by that side's within a round: its 8-bit base is compared
with Q8_0, its 4-bit base with Q4_0, its FP16 base with the rest. Run nothing else meanwhile: llama.cpp's threads wait for each other in
loops, and a busy machine slows it far more than the other sides. The last line says how busy it was.

llama.cpp is the build in the npm package node-llama-cpp, called through its C interface (llama_bench.cpp),
with F16, Q8_0 and Q4_0 files of the same weights. The package, the compiled program and the files are made in
--peers, which needs npm, git and g++. llama.cpp picks its build for this CPU; `--llama-cpu haswell` holds it
to AVX2, for comparison with an engraft that was built without the feature `avx512`. With `--adapter auto` a
LoRA of rank 16 on all linear sites is made first and measured too.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time

from common import HERE, RELEASE, ROOT, base, job, save, train_command, words, write_rows

# Version of node-llama-cpp and of the packages with its libraries, one for each platform.
LLAMA_VERSION = "3.22.1"
PLATFORM = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}.get(platform.machine())
# If other processes use a smaller share of the CPUs than this, the figures are good.
QUIET = 0.05


def busy_seconds():
    """CPU seconds since the machine started that processes used or a hypervisor took away."""
    user, nice, system, _, _, irq, softirq, steal = map(int, open("/proc/stat").readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def speeds(command):
    """The last line that a side prints, and the share of all CPUs that other processes used meanwhile."""
    start, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
    done = subprocess.run(words(command), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words(command))}\n{done.stderr}")
    others = (busy_seconds() - busy) - (own_seconds() - own)
    share = max(0, others / (time.perf_counter() - start) / os.cpu_count())
    return json.loads(done.stdout.splitlines()[-1]), share


def npm_package(folder, name):
    """The folder of an unpacked npm package, without what it depends on and without its install script."""
    target = folder / f"{name.split('/')[-1]}-{LLAMA_VERSION}"
    if not target.exists():
        pack = ["npm", "pack", "--silent", "--pack-destination", folder, f"{name}@{LLAMA_VERSION}"]
        packed = subprocess.run(pack, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
        unpacked = folder / f"{target.name}.part"
        shutil.rmtree(unpacked, ignore_errors=True)
        shutil.unpack_archive(folder / packed, unpacked, filter="data")
        (unpacked / "package").rename(target)
        unpacked.rmdir()
        (folder / packed).unlink()
    return target


def llama_bench(folder):
    """The command that times llama.cpp, without its GGUF file; compiles it if it is missing or old."""
    if PLATFORM is None:
        sys.exit(f"node-llama-cpp has no libraries for {platform.machine()}")
    libraries = npm_package(folder, f"@node-llama-cpp/{PLATFORM}") / "bins" / PLATFORM
    source = folder / f"llama.cpp-{LLAMA_VERSION}"
    if not source.exists():
        bundle = npm_package(folder, "node-llama-cpp") / "llama" / "gitRelease.bundle"
        quiet = ["-c", "advice.detachedHead=false", "-c", "init.defaultBranch=main"]
        subprocess.run(words(["git", *quiet, "clone", "--quiet", bundle, source]), check=True)
    code, program = HERE / "llama_bench.cpp", folder / f"llama_bench-{LLAMA_VERSION}"
    if not program.exists() or program.stat().st_mtime < code.stat().st_mtime:
        # Linked by path: -l cannot name libraries whose names end in llama.cpp's version.
        linked = [library for name in ["llama-common", "llama", "ggml", "ggml-base"]
                  for library in libraries.glob(f"lib{name}.*so")]
        headers = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
        compiler = ["g++", "-O2", "-std=c++17", *headers, f"-Wl,-rpath,{libraries}"]
        subprocess.run(words([*compiler, code, *linked, "-o", program]), check=True)
    return [program, "--backends", libraries]


def peers(folder, source):
    """llama.cpp's command and the base as GGUF files, {type: file}; makes those that are missing or old."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    files, written = {}, (source / "model.safetensors").stat().st_mtime
    for kind in ["f16", "q8_0", "q4_0"]:
        files[kind] = folder / f"{source.resolve().name}-{kind}.gguf"
        if not files[kind].exists() or files[kind].stat().st_mtime < written:
            convert = [sys.executable, HERE / "gguf_base.py", source, files[kind], "--type", kind]
            subprocess.run(words(convert), check=True, stdout=sys.stderr)
    return llama_bench(folder), files


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
    p.add_argument("--llama-cpu", metavar="NAME", help="llama.cpp's build for that CPU: haswell has AVX2")
    p.add_argument("--bf16", action="store_true",
                   help="engraft and Transformers in BF16 too: the latter is slow where the CPU has no BF16")
    p.add_argument("--json", type=pathlib.Path, metavar="FILE")
    a = p.parse_args()

    source = a.base or base(a.bases, a.size)
    # First, because later the peers raise the peak of this process's children.
    seconds, peak = first_token(RELEASE / "engraft-infer", source)
    (bench, *folder), files = peers(a.peers, source)
    work = ["--prompt", a.prompt, "--rows", a.rows, "--new", a.new]
    ours = [RELEASE / "examples" / "decoding", source, *work]
    build = ["--cpu", a.llama_cpu] if a.llama_cpu else []
    llama = lambda kind: [bench, files[kind], *folder, *build, *work]
    hf = [sys.executable, HERE / "generate_peer.py", source, *work]
    sides, best = {"engraft": ours}, "engraft"
    if a.bf16:
        ours, best = [*ours, "--bf16"], "engraft BF16"
        sides[best] = ours
    if a.adapter == "auto":
        sides[f"{best}, LoRA"] = [*ours, "--adapter", adapter(RELEASE / "engraft", source, a.peers)]
    eight, four = f"{best}, 8-bit", f"{best}, 4-bit"
    sides |= {"llama.cpp F16": llama("f16"), eight: [*ours, "--q8"], "llama.cpp Q8_0": llama("q8_0"),
              four: [*ours, "--nf4"], "llama.cpp Q4_0": llama("q4_0"), "Transformers F32": hf}
    if a.bf16:
        sides["Transformers BF16"] = [*hf, "--dtype", "bf16"]
    against = {side: {"llama.cpp Q8_0": eight, "llama.cpp Q4_0": four}.get(side, best) for side in sides}

    rounds, others = [], []
    for number in range(a.rounds):
        rounds.append({})
        for side, command in sides.items():
            rounds[-1][side], share = speeds(command)
            others.append(share)
            print(f"round {number}: {side}: {rounds[-1][side]}; others: {share:.0%} of the CPUs", flush=True)

    print(f"\n{platform.machine()}, {os.cpu_count()} CPUs; {a.size}; tokens/s, medians of {a.rounds}; "
          f"in brackets the speed of {best} divided by it, for Q8_0 and Q4_0 that of the base of as many bits")
    names = list(rounds[0]["engraft"])
    print(f"{'':24}" + "".join(f"{name:>20}" for name in names))
    for side in sides:
        cells = []
        for name in names:
            if name not in rounds[0][side]:
                cells.append("")
                continue
            speed = statistics.median(r[side][name] for r in rounds)
            ratio = statistics.median(r[against[side]][name] / r[side][name] for r in rounds)
            cells.append(f"{speed:.1f} ({ratio:.2f} x)")
        print(f"{side:24}" + "".join(f"{cell:>20}" for cell in cells))
    llama = rounds[0]["llama.cpp F16"]
    print(f"\nllama.cpp used {llama['backend']} and {llama['threads']} threads")
    print(f"engraft-infer: {seconds:.2f} s from the shell to its end with one token, peak resident set "
          f"{peak / 2**20:.0f} MiB with 201")
    print(f"other processes used {statistics.median(others):.0%} of the CPUs (median of all runs), at most "
          f"{max(others):.0%}")
    if max(others) > QUIET:
        print("The machine was too busy for figures of llama.cpp: measure again.")
    save(a.json, {"rounds": rounds, "others": others, "first_token_s": seconds, "peak_bytes": peak})


if __name__ == "__main__":
    main()
