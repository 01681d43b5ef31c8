#!/usr/bin/env bash
# build.sh FOLDER: makes a libcuda and a libcublasLt in FOLDER that run kernels on the CPU, to test all of
# `--device cuda` without a GPU, slowly:
#
#     cuda-shim/driver/build.sh target/shim
#     LD_LIBRARY_PATH=target/shim cargo run --release --features cuda --example device_check
#
# driver.cpp tells its variables: SHIM_MEMORY, the bytes of the device, 6 GiB if it is not set; SHIM_FILL, the byte in
# fresh memory; SHIM_LATE, with which kernels run as late as they may, and copies on other streams as early; and others.
# The program may have been built with the stand-in of scripts/cuda-toolchain.sh: its own kernels are not used.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shim=$(cd "$(dirname "$0")/.." && pwd)
kernels=$shim/../src/kernels
flags=(-O2 -fPIC -std=c++17)

objects=()
# selftest.cu has kernels with known mistakes, for refusals.cpp. Misaligned vectors are trapped, as a device does it.
for source in "$kernels"/*/kernel.cu "$shim/shim/selftest.cu"; do
    object=$folder/$(basename "$(dirname "$source")").o
    "${CXX:-g++}" "${flags[@]}" -fsanitize=alignment -fsanitize-undefined-trap-on-error \
        -DCPU_SHIM -fno-strict-aliasing -w -I "$shim/shim" -I "$kernels" -I "$kernels/../device/cuda" \
        -x c++ -c "$source" -o "$object"
    objects+=("$object")
done
"${CXX:-g++}" "${flags[@]}" -c "$shim/driver/driver.cpp" -o "$folder/driver.o"
"${CXX:-g++}" -shared -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so.1" "$folder/driver.o" "${objects[@]}" -ldl
# Sums in any order, for speed.
"${CXX:-g++}" "${flags[@]}" -O3 -ffast-math -shared -Wl,-soname,libcublasLt.so.13 -o "$folder/libcublasLt.so.13" \
    "$shim/driver/products.cpp" "$folder/libcuda.so.1" "-Wl,-rpath,\$ORIGIN"
"${CXX:-g++}" "${flags[@]}" -o "$folder/refusals" "$shim/driver/refusals.cpp" \
    "$folder/libcuda.so.1" "$folder/libcublasLt.so.13" "-Wl,-rpath,\$ORIGIN"
"$folder/refusals"
echo "libcuda and libcublasLt of the shim are in $folder"
