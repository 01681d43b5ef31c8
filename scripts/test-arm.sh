#!/usr/bin/env bash
# Runs the tests of the kernels as a 64-bit ARM program, emulated on other machines.
#
#     scripts/test-arm.sh
#
# Installs missing packages: the standard library for the target (rustup) and, on Debian, a cross compiler and qemu-user.
# Emulated code is slow, so nothing is timed.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
rustup target add $target
if [ "$(uname -m)" != aarch64 ]; then
    if ! command -v qemu-aarch64 aarch64-linux-gnu-g++ >/dev/null; then
        apt-get update && apt-get install -y qemu-user g++-aarch64-linux-gnu
    fi
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
fi
arm() { cargo test --release --target $target -p engraft "$@"; }
# Tests that start themselves again would need a system that runs ARM programs. A variable selects the plain level
# instead.
arm --lib kernels:: -- --skip lower_levels
ENGRAFT_TEST_LEVEL=Plain arm --lib kernels:: -- --skip lower_levels
