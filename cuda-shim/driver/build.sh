#!/usr/bin/env bash
# build.sh FOLDER: makes a libcuda and a libcublasLt in FOLDER that run kernels on the CPU, to test all of
# `--device cuda` without a GPU, slowly:
#
#     cuda-shim/driver/build.sh target/shim
#     LD_LIBRARY_PATH=target/shim cargo run --release --features cuda --example device_check
#
# SHIM_MEMORY is the device's memory in bytes, by default 6 GiB. With SHIM_LATE kernels run as late as the streams allow,
# and copies on other streams as early as possible.
# The program may have been built with the stand-in of scripts/cuda-toolchain.sh: its own kernels are not used.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shim=$(cd "$(dirname "$0")/.." && pwd)
kernels=$shim/../src/kernels
flags=(-O2 -fPIC -std=c++17)

objects=()
for source in "$kernels"/*/kernel.cu; do
    object=$folder/$(basename "$(dirname "$source")").o
    "${CXX:-g++}" "${flags[@]}" -DCPU_SHIM -fno-strict-aliasing -w -I "$shim/shim" -I "$kernels" -I "$kernels/../device/cuda" \
        -x c++ -c "$source" -o "$object"
    objects+=("$object")
done
"${CXX:-g++}" "${flags[@]}" -c "$shim/driver/driver.cpp" -o "$folder/driver.o"
"${CXX:-g++}" -shared -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so.1" "$folder/driver.o" "${objects[@]}" -ldl
# -ffast-math: sums in any order, for speed.
"${CXX:-g++}" "${flags[@]}" -O3 -ffast-math -shared -o "$folder/libcublasLt.so.13" \
    "$shim/driver/products.cpp" "$folder/libcuda.so.1" "-Wl,-rpath,\$ORIGIN"
echo "libcuda and libcublasLt of the shim are in $folder"
