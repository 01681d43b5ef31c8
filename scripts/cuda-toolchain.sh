#!/usr/bin/env bash
# cuda-toolchain.sh FOLDER [--stand-in]: lays out a CUDA compiler in FOLDER, for machines without one.
#
# Needs bash, python3 with pip, and gcc; no GPU, driver or root. The compiler comes from its Python
# wheels, about 110 MB, 277 MB unpacked; a second run changes nothing. Afterwards
#
#     . FOLDER/env.sh && cargo build --release --features cuda
#
# --stand-in downloads nothing and writes an nvcc that compiles nothing: enough for `cargo check` and
# `cargo clippy --features cuda`. A program built with it starts but cannot launch a kernel.
#
# Version 13.0, because drivers from 580 on accept its PTX, which is compiled for later devices.
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
    # Creates an empty file after -o and ignores all other arguments.
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

# The compiler driver, its headers, the device compiler, the runtime's headers and the standard library, in the
# versions that the meta-package cuda-toolkit 13.0.2 requires.
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
"""Unpacks the folder nvidia/cu13 of a wheel, which is laid out as a CUDA installation."""
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
        # Wheels do not keep the mode of a file.
        if "bin/" in name:
            target.chmod(0o755)
END
    touch "$home/.have-$stem"
done
ln -sfn lib "$home/lib64"
write_env

# Compiling a kernel checks more than `nvcc --version`.
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
cat >"$probe/probe.cu" <<'END'
#include <cuda_fp16.h>
extern "C" __global__ void probe(__half *x) { x[threadIdx.x] = __hmul(x[threadIdx.x], x[0]); }
END
"$home/bin/nvcc" -std=c++17 -gencode=arch=compute_90,code=sm_90 -fatbin -o "$probe/probe.fatbin" "$probe/probe.cu"
echo "CUDA $("$home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p') is in $home; source $folder/env.sh"
