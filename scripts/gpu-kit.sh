#!/usr/bin/env bash
# gpu-kit.sh FOLDER [BIN]: makes FOLDER, below 60 MiB, with everything that a check on a machine with a GPU takes: programs,
# scripts, golden files, and the kernels' sources. BIN is the folder of the programs, target/release if it is not given,
# built by
#
#     scripts/cuda-toolchain.sh target/nvcc && . target/nvcc/env.sh
#     cargo build --release --features cuda --bins --example device_check
#
# That machine needs a driver for CUDA 13.0 (580 or later) and a python3 with torch, transformers, peft and numpy, whose CUDA
# libraries are found; no Rust, no network, no root, and not these sources. There
#
#     cd FOLDER && python3 gpu.py right && python3 gpu.py fast && python3 gpu.py why
#
# takes at most 9 minutes a command, and leaves results/gpu.json and results/gpu.log. A kernel is changed there by
#
#     scripts/compile-kernels.sh images attention && ENGRAFT_KERNELS=$PWD/images python3 gpu.py right
set -euo pipefail
[ $# -ge 1 ] && [ $# -le 2 ] || { echo "usage: $0 FOLDER [BIN]" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$(cd "${2:-$root/target/release}" && pwd)
[ ! -e "$1" ] || { echo "$1: is there already; name a new folder" >&2; exit 2; }
for program in engraft engraft-infer examples/device_check; do
    [ -x "$bin/$program" ] || { echo "$bin/$program: is not built; build with --features cuda" >&2; exit 2; }
done
mkdir -p "$1"/{programs,scripts,src/kernels,src/device/cuda}
kit=$(cd "$1" && pwd)

cp "$bin/engraft" "$bin/engraft-infer" "$bin/examples/device_check" "$kit/programs"
# Cargo strips them already; a build of another profile may not have.
strip "$kit"/programs/*
gzip -9n "$kit"/programs/*
cd "$root"
cp benchmarks/{gpu,gpu_session,gpu_goals,gpu_profile,common,limited,gpt2,peft_step,generate_peer,torch_ops}.py "$kit"
cp -r tests/golden "$kit/golden"
# Of the golden files alone what device_check reads.
rm -rf "$kit"/golden/{parquet,tensorboard} "$kit"/golden/*.py
cp scripts/compile-kernels.sh "$kit/scripts"
for source in src/kernels/*/*.cu src/kernels/*/*.cuh; do
    mkdir -p "$kit/$(dirname "$source")"
    cp "$source" "$kit/$source"
done
cp src/device/cuda/*.cuh "$kit/src/device/cuda"
sed -n '/^# That machine/,/^set/p' scripts/gpu-kit.sh | sed -n 's/^# \{0,1\}//p' >"$kit/README"
{ git rev-parse HEAD && git status --short; } 2>/dev/null >"$kit/COMMIT" || echo unknown >"$kit/COMMIT"

bytes=$(du -sb "$kit" | cut -f1)
[ "$bytes" -lt $((60 << 20)) ] || { echo "$kit: has $bytes bytes, more than 60 MiB" >&2; exit 1; }
echo "$kit: $bytes bytes; run it with python3 gpu.py right|fast|why|all"
