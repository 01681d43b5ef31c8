#!/usr/bin/env bash
# programs.sh SHIM BIN: runs the programs in BIN, built with the feature cuda, on the driver that build.sh made in SHIM,
# and compares their results with those of the same programs on the CPU:
#
#     cargo build --release --features cuda
#     cuda-shim/driver/programs.sh target/shim target/release
#
# Trains on a tiny base of tests/golden (streamed and offloaded too), evaluates, generates, and runs out of device memory.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 SHIM BIN" >&2; exit 2; }
shim=$(cd "$1" && pwd)
bin=$(cd "$2" && pwd)
base=$(cd "$(dirname "$0")/../.." && pwd)/tests/golden/bases/tiny
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ENGRAFT_CACHE=$work/cache
cd "$work"
for start in 1 7 13 19 25 31 37 43; do
    ids=$(seq -s, $start 2 $((start + 16)))
    echo "{\"input_ids\": [$ids], \"labels\": [$ids]}"
done >rows.jsonl

cpu() { "$@" --device cpu; }
cuda() { LD_LIBRARY_PATH=$shim "$@" --device cuda --precision "$precision"; }
number() { grep -o "\"$1\":[0-9][^,}]*" "$2" | tail -n 1 | cut -d: -f2; }
tokens() { grep -o '"token_ids":\[[0-9][^]]*\]' "$1"; }
close() { # WHAT A B BOUND
    awk -v a="$2" -v b="$3" -v bound="$4" 'BEGIN { d = (a - b) / a; if (d < 0) d = -d; exit !(d <= bound) }' ||
        { echo "$1: $2 on the CPU, $3 on the device" >&2; exit 1; }
    echo "$1: $2 on the CPU, $3 on the device"
}
same() { diff -r "$2" "$3" || { echo "$1: $2 and $3 differ" >&2; exit 1; }; echo "$1: alike"; }

train=("$bin/engraft" train --base "$base" --data rows.jsonl --batch 4 --method lora+prefix --rank 3 --targets all-linear
    --prefix-len 4 --prefix-init random --steps 4 --save-every 2 --recompute all
    --micro-batch 2 --head-rows 16 --json --offline)
eval=("$bin/engraft" eval --base "$base" --data rows.jsonl --json --offline)
generate=("$bin/engraft-infer" generate --base "$base" --input-ids 1,3,5,7 --max-new-tokens 6 --temperature 0 --json --offline)

cpu "${train[@]}" --output on-cpu >on-cpu.log
cpu "${eval[@]}" --adapter on-cpu/adapter >eval-cpu.log
cpu "${generate[@]}" --adapter on-cpu/adapter >generate-cpu.log
for precision in f32 f16; do
    bound=$([ $precision = f32 ] && echo 1e-5 || echo 5e-3)
    cuda "${train[@]}" --output $precision >$precision.log
    close "train $precision" "$(number loss on-cpu.log)" "$(number loss $precision.log)" $bound
    cuda "${train[@]}" --output $precision-streamed --stream-base on >$precision-streamed.log
    same "train $precision, streamed" $precision/adapter $precision-streamed/adapter
    cuda "${train[@]}" --output $precision-away --stream-base on --offload-inputs --offload-optimizer >$precision-away.log
    same "train $precision, streamed, offloaded" $precision/adapter $precision-away/adapter
    cuda "${eval[@]}" --adapter on-cpu/adapter >eval.log
    close "eval $precision" "$(number loss eval-cpu.log)" "$(number loss eval.log)" $bound
    cuda "${generate[@]}" --adapter on-cpu/adapter >generate.log
    tokens generate-cpu.log >expected
    tokens generate.log >found
    same "generate $precision: tokens" expected found
    cuda "${generate[@]}" --adapter on-cpu/adapter --stream-base on >generate.log
    tokens generate.log >found
    same "generate $precision, streamed: tokens" expected found
    cuda "${eval[@]}" --adapter on-cpu/adapter --stream-base on >eval-streamed.log
    same "eval $precision, streamed" eval.log eval-streamed.log
    SHIM_NO_RECORDING=1 cuda "${generate[@]}" --adapter on-cpu/adapter >generate.log
    tokens generate.log >found
    same "generate $precision, launch by launch: tokens" expected found
done

# Bases of codes, against the CPU on the same codes.
precision=f16
for dtype in q8 nf4; do
    kept=(--base-dtype "$dtype")
    cpu "${train[@]}" "${kept[@]}" --output "$dtype-cpu" >$dtype-cpu.log
    cuda "${train[@]}" "${kept[@]}" --output $dtype >$dtype.log
    close "train $dtype" "$(number loss $dtype-cpu.log)" "$(number loss $dtype.log)" 5e-3
    cuda "${train[@]}" "${kept[@]}" --output $dtype-away --stream-base on --offload-inputs --offload-optimizer >$dtype-away.log
    same "train $dtype, streamed, offloaded" $dtype/adapter $dtype-away/adapter
    cuda "${train[@]}" "${kept[@]}" --output $dtype-cut --optimizer adamw8bit >$dtype-cut.log
    cp -r $dtype-cut $dtype-whole
    cuda "$bin/engraft" train --resume --output $dtype-cut --resume-from 2 --offline >$dtype-resumed.log
    same "train $dtype, 8-bit moments, resumed" $dtype-whole/adapter $dtype-cut/adapter
    cpu "${eval[@]}" "${kept[@]}" --adapter on-cpu/adapter >eval-$dtype.log
    cuda "${eval[@]}" "${kept[@]}" --adapter on-cpu/adapter >eval.log
    close "eval $dtype" "$(number loss eval-$dtype.log)" "$(number loss eval.log)" 5e-3
    cpu "${generate[@]}" "${kept[@]}" --adapter on-cpu/adapter >generate-$dtype.log
    cuda "${generate[@]}" "${kept[@]}" --adapter on-cpu/adapter >generate.log
    tokens generate-$dtype.log >expected
    tokens generate.log >found
    same "generate $dtype: tokens" expected found
    cuda "${generate[@]}" "${kept[@]}" --adapter on-cpu/adapter --stream-base on >generate.log
    tokens generate.log >found
    same "generate $dtype, streamed: tokens" expected found
done

precision=f16
if SHIM_MEMORY=20000 cuda "${eval[@]}" 2>refused; then echo "the base fits into 20000 bytes, which is impossible" >&2; exit 1; fi
grep 'bytes for the base cannot be allocated on CUDA device 0 (free: .*): out of memory; .*--stream-base on' refused

# Images from a folder come before the built-in ones, which is told; a wrong one is named.
mkdir images
printf 'stand-in\0' >images/layernorm.fatbin
ENGRAFT_KERNELS=images cuda "${eval[@]}" --adapter on-cpu/adapter >eval-images.log 2>hint
grep 'hint: kernels of layernorm are those of images (ENGRAFT_KERNELS)' hint
cuda "${eval[@]}" --adapter on-cpu/adapter >eval.log
same "eval $precision, an image from a folder" eval.log eval-images.log
echo '__global__ void layernorm_forward_f16()' >images/layernorm.fatbin
if ENGRAFT_KERNELS=images cuda "${eval[@]}" 2>refused; then echo "an image that is none is loaded" >&2; exit 1; fi
grep 'layernorm: images/layernorm.fatbin: .*image is invalid.*; compile it for this device' refused
mv images/layernorm.fatbin images/layernrom.fatbin
if ENGRAFT_KERNELS=images cuda "${eval[@]}" 2>refused; then echo "the image of no op is taken" >&2; exit 1; fi
grep 'images/layernrom.fatbin: is the image of no op; there are activation, ' refused

# What cannot be used is told when the device is opened, with a remedy, and --device auto goes on without it.
refuses() { # VARIABLE SENTENCE
    if env "$1" LD_LIBRARY_PATH="$shim" "${eval[@]}" --device cuda >/dev/null 2>refused; then
        echo "$1 is not refused" >&2
        exit 1
    fi
    grep "$2" refused
    env "$1" LD_LIBRARY_PATH="$shim" "${eval[@]}" --device auto >eval-auto.log 2>hint
    grep "hint: --device auto takes a CPU: .*$2" hint
    cmp eval-auto.log <(cpu "${eval[@]}")
}
refuses SHIM_DRIVER=12040 'for CUDA 12.4 and the kernels need one for CUDA 13.0, 580 or later; update the driver'
refuses SHIM_CAPABILITY=75 'capability is 7.5 and the kernels need 8.0'
refuses SHIM_NO_IMAGE=1 'does not load the kernels: .*; build the program with nvcc 13.0'
