#!/usr/bin/env bash
# cuda-toolchain.sh FOLDER [--stand-in]: lays out a CUDA compiler in FOLDER, for machines without one.
#
# Needs no GPU, no driver and no root, but bash, python3 with pip, and gcc. The compiler comes from its Python
# wheels, about 110 MB, 277 MB unpacked; a second run changes nothing. Afterwards
#
#     . FOLDER/env.sh && cargo build --release --features cuda
#
# --stand-in fetches nothing and writes an nvcc that compiles nothing: enough for `cargo check` and
# `cargo clippy --features cuda`; a program built with it starts and cannot launch a kernel.
#
# 13.0 and no newer one: the PTX for later devices is then of the version that drivers from 580 on take.
set -euo pipefail

usage() {
    echo "usage: $0 FOLDER [--stand-in]" >&2
    exit 2
}
[ $# -ge 1 ] && [ $# -le 2 ] || usage
folder=$1
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
home=$folder/cuda

write_env() {
    cat >"$folder/env.sh" <<END
export CUDA_HOME="$home" CUDA_PATH="$home" NVCC="$home/bin/nvcc" PATH="$home/bin:\$PATH"
END
}

if [ "${2:-}" = --stand-in ]; then
    mkdir -p "$home/bin"
    # Whatever it is told to compile, it writes nothing into the file behind -o.
    cat >"$home/bin/nvcc" <<'END'
#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then printf "stand-in\000" >"$2"; fi
    shift
done
END
    chmod +x "$home/bin/nvcc"
    write_env
    echo "a stand-in for nvcc is in $home/bin; source $folder/env.sh"
    exit 0
fi
[ $# -eq 1 ] || usage

# The compiler driver, its headers, the device compiler, the runtime's headers and the standard library: the
# versions that the meta-package cuda-toolkit 13.0.2 asks for together.
wheels=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85
    nvidia-cuda-nvdisasm==13.2.86 # for check-kernels.sh; it has no older wheel and reads older machine code
)
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
mkdir -p "$folder/wheels" "$home"
for wheel in "${wheels[@]}"; do
    stem=${wheel//-/_}
    stem=${stem/==/-}
    [ -e "$home/.have-$stem" ] && continue
    python3 -m pip download --quiet --no-deps --only-binary=:all: \
        "${platforms[@]/#/--platform=}" --dest "$folder/wheels" "$wheel"
    python3 - "$home" "$folder/wheels" "$stem" <<'END'
"""Unpacks what a wheel holds below nvidia/cu13, which is laid out as a CUDA installation."""
import pathlib, sys, zipfile

home, wheels, stem = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
(path,) = wheels.glob(f"{stem}-*.whl")
with zipfile.ZipFile(path) as wheel:
    for entry in wheel.infolist():
        root, _, name = entry.filename.partition("nvidia/cu13/")
        if root or not name or entry.is_dir() or ".." in name.split("/"):
            continue
        target = home / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(entry))
        # Wheels drop the mode of a file.
        if "bin/" in name:
            target.chmod(0o755)
END
    touch "$home/.have-$stem"
done
ln -sfn lib "$home/lib64"
write_env

# A kernel tells more than a version.
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
cat >"$probe/probe.cu" <<'END'
#include <cuda_fp16.h>
extern "C" __global__ void probe(__half *x) { x[threadIdx.x] = __hmul(x[threadIdx.x], x[0]); }
END
"$home/bin/nvcc" -std=c++17 -gencode=arch=compute_90,code=sm_90 -fatbin -o "$probe/probe.fatbin" "$probe/probe.cu"
echo "CUDA $("$home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p') is in $home; source $folder/env.sh"
