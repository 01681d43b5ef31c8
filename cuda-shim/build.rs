//! Compiles every `kernel.cu` as C++ with the shim's headers.

use std::path::Path;

fn main() {
    let kernels = Path::new("../src/kernels");
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-changed={}", kernels.display());
    println!("cargo:rerun-if-changed=../src/device/cuda");
    let mut build = cc::Build::new();
    // Buffers change their element type (gradients replace logits), so strict aliasing does not hold.
    build.warnings(false).cpp(true).std("c++17").opt_level(2).define("CPU_SHIM", None);
    build.flag("-xc++").flag("-fno-strict-aliasing").flag("-Wno-unknown-pragmas");
    build.include("shim").include(kernels).include("../src/device/cuda").file("shim/selftest.cu");
    let folders = std::fs::read_dir(kernels).expect("the folder of kernels").map_while(Result::ok);
    for source in folders.map(|folder| folder.path().join("kernel.cu")).filter(|path| path.exists()) {
        build.file(source);
    }
    build.compile("kernels");
}
