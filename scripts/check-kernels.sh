#!/usr/bin/env bash
# check-kernels.sh [FOLDER [KERNELS]]: compiles every kernel.cu below KERNELS (src/kernels) by the CUDA compiler that
# cuda-toolchain.sh lays out in FOLDER (target/nvcc), for every architecture that build.rs names, and fails
#
#   - on any warning of the compiler or of ptxas,
#   - on any register that is spilled to memory, in any kernel,
#   - on an attention kernel for tensor cores whose machine code has no tensor-core instruction of its type.
#
# Needs no GPU and keeps only the toolchain. Takes about a minute on two cores, the download included.
set -euo pipefail
[ $# -le 2 ] || { echo "usage: $0 [FOLDER [KERNELS]]" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
toolchain=${1:-$root/target/nvcc}
kernels=$(cd "${2:-$root/src/kernels}" && pwd)
"$root/scripts/cuda-toolchain.sh" "$toolchain"
. "$toolchain/env.sh"

mapfile -t architectures < <(grep -o 'code=sm_[0-9]*' "$root/build.rs" | sed 's/code=sm_//')
[ ${#architectures[@]} -gt 0 ] || { echo "build.rs names no architecture" >&2; exit 1; }
flags=(-std=c++17 -O3)
grep -q '"-std=c++17", "-O3"' "$root/build.rs" || { echo "build.rs compiles with other flags than $0" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export work kernels flags_line="${flags[*]}"
compile() {
    read -r source architecture <<<"$1"
    name=$(basename "$(dirname "$source")").sm_$architecture
    # Unquoted, so that each flag is a word.
    # shellcheck disable=SC2086
    "$NVCC" $flags_line -I "$kernels" -I "$kernels/../device/cuda" -Werror all-warnings -Xptxas -v -cubin \
        -gencode="arch=compute_$architecture,code=sm_$architecture" -o "$work/$name.cubin" "$source" \
        >"$work/$name.log" 2>&1 || echo "$name: does not compile" >"$work/$name.failed"
}
export -f compile
# The slowest source first: if it began last, the other cores would be idle while it compiles.
for source in $(ls -S "$kernels"/*/kernel.cu); do
    for architecture in "${architectures[@]}"; do echo "$source $architecture"; done
done | sort -s -t/ -k1,1 | awk '/attention/ { print; next } { rest = rest $0 "\n" } END { printf "%s", rest }' |
    xargs -P "$(nproc)" -d '\n' -I{} bash -c 'compile "$1"' _ {}

bad=0
complain() { echo "$1" >&2; bad=1; }
functions=0
tensor=0
for log in "$work"/*.log; do
    name=$(basename "$log" .log)
    if [ -e "$work/$name.failed" ] || grep -qi warning "$log"; then
        complain "$name: messages of the compiler:"
        grep -v '^ptxas info' "$log" | head -40 >&2
        [ -e "$work/$name.failed" ] && continue
    fi
    # ptxas prints the name of a function, then its stack size and its spills.
    while read -r function stores loads; do
        functions=$((functions + 1))
        [ "$stores $loads" = "0 0" ] || complain "$name: $function spills: $stores bytes of stores, $loads of loads"
    done < <(awk '
        /Function properties for/ { function_ = $NF }
        /bytes spill stores/ { for (i = 1; i < NF; i++) if ($(i + 1) == "bytes" && $(i + 2) == "spill") {
            if ($(i + 3) ~ /stores/) stores = $i; else loads = $i }; print function_, stores, loads }' "$log")
    [[ $name == attention.* ]] || continue
    while read -r function count; do
        tensor=$((tensor + 1))
        [ "$count" -gt 0 ] || complain "$name: $function has no tensor-core instruction of its type"
        echo "$name: $function: $count tensor-core instructions"
    done < <("$toolchain/cuda/bin/nvdisasm" -c "$work/$name.cubin" | awk '
        /\.section[ \t]+\.text\./ { sub(/.*\.text\./, ""); sub(/[," \t].*/, ""); own = $0; if (own ~ /_mma_/) n[own] += 0 }
        / HMMA\./ { wanted = own ~ /_bf16$/; has = /\.BF16/ ? 1 : 0; if (own ~ /_mma_/ && wanted == has) n[own]++ }
        END { for (f in n) print f, n[f] }' | sort)
done
# Forward, gradients of queries, gradients of keys and values; two types each.
expected=$((6 * ${#architectures[@]}))
[ "$tensor" -eq "$expected" ] || complain "$tensor tensor-core kernels of attention were checked, not $expected"
[ "$functions" -gt 0 ] || complain "ptxas reported no function"
echo "$functions kernels for sm_${architectures[*]}: $([ $bad = 0 ] && echo "no spill, no warning" || echo "refused")"
exit $bad
