#!/usr/bin/env bash
# compile-kernels.sh FOLDER [OP..]: compiles the kernels of all ops, or of those named, into FOLDER/OP.fatbin, for the device
# of this machine (ARCHITECTURE=90 names its compute capability without the dot; 90 if it is not set). Needs an nvcc of CUDA
# 13.0, in NVCC or in PATH, and no Rust. Afterwards
#
#     ENGRAFT_KERNELS=FOLDER device_check 0 ops
#
# runs with these kernels instead of the built-in ones: the program names them when it opens the device. The kernels must
# keep their names, arguments and grids.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 FOLDER [OP..]" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
sources=$(cd "$(dirname "$0")/../src" && pwd)
architecture=${ARCHITECTURE:-90}
if [ $# -eq 0 ]; then
    for source in "$sources"/kernels/*/kernel.cu; do set -- "$@" "$(basename "$(dirname "$source")")"; done
fi
running=()
for op in "$@"; do
    source=$sources/kernels/$op/kernel.cu
    [ -e "$source" ] || { echo "$op: has no $source" >&2; exit 2; }
    # As build.rs does it; line numbers for ncu and compute-sanitizer.
    "${NVCC:-nvcc}" -std=c++17 -O3 -lineinfo -fatbin -I "$sources/kernels" -I "$sources/device/cuda" \
        "-gencode=arch=compute_$architecture,code=sm_$architecture" -o "$folder/$op.fatbin" "$source" &
    running+=($!)
done
for child in "${running[@]}"; do wait "$child"; done
echo "$# images are in $folder; run with ENGRAFT_KERNELS=$folder"
