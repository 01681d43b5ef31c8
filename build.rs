//! Compiles the CUDA kernels, one fat binary for each op, if the feature `cuda` is on; otherwise does nothing.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Machine code for two generations of devices (compute capability 8 and 9), and PTX that
/// the driver compiles for later generations.
const TARGETS: [&str; 3] = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
];

const KERNELS: &str = "src/kernels";

/// Headers that the kernels of all ops include.
const SHARED: &str = "src/device/cuda";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(error) = compile_all() {
        println!("cargo::error={error}");
    }
}

fn compile_all() -> Result<(), String> {
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let nvcc = find_nvcc().ok_or(
        "the feature `cuda` needs nvcc, which is not in NVCC, CUDA_HOME, CUDA_PATH or PATH; install CUDA, or run scripts/cuda-toolchain.sh and source the env.sh it writes",
    )?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo gives no OUT_DIR")?);
    // A kernel takes up to a minute to compile, so all compile at the same time.
    let running: Vec<_> = kernels()?
        .into_iter()
        .map(|(op, source)| {
            let child = compiler(&nvcc, &source, &out.join(format!("{op}.fatbin"))).spawn();
            child
                .map(|child| (source, child))
                .map_err(|cause| format!("{} cannot be run: {cause}", nvcc.display()))
        })
        .collect::<Result<_, _>>()?;
    for (source, mut child) in running {
        let done = child.wait().map_err(|cause| format!("nvcc was lost: {cause}"))?;
        if !done.success() {
            return Err(format!("{}: nvcc ended with {done}; its messages are above", source.display()));
        }
    }
    Ok(())
}

fn compiler(nvcc: &Path, source: &Path, output: &Path) -> Command {
    let mut command = Command::new(nvcc);
    // No fast math: dropout must have the bits of the CPU side, and division must be correctly rounded.
    command.args(["-std=c++17", "-O3", "-fatbin", "-I", KERNELS, "-I", SHARED]).args(TARGETS);
    command.arg("-o").arg(output).arg(source);
    command
}

/// Folder name and source of every op that has kernels. Tells cargo to watch these and their headers, not the
/// Rust files in the same folders.
fn kernels() -> Result<Vec<(String, PathBuf)>, String> {
    let mut found = Vec::new();
    for folder in [vec![PathBuf::from(SHARED)], list(Path::new(KERNELS))?].concat() {
        if !folder.is_dir() {
            continue;
        }
        for file in list(&folder)? {
            let ending = file.extension().and_then(|ending| ending.to_str());
            if matches!(ending, Some("cu" | "cuh")) {
                println!("cargo::rerun-if-changed={}", file.display());
            }
            if file.ends_with("kernel.cu") {
                let op = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.push((op, file));
            }
        }
    }
    found.sort();
    Ok(found)
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let unreadable = |cause: std::io::Error| format!("{}: cannot be read: {cause}", folder.display());
    let entries = fs::read_dir(folder).map_err(unreadable)?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(unreadable)).collect()
}

/// The path in NVCC, or `bin/nvcc` below CUDA_HOME or CUDA_PATH, or nvcc in PATH.
fn find_nvcc() -> Option<PathBuf> {
    let named = env::var_os("NVCC").map(PathBuf::from);
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let homes = homes.map(|home| Path::new(&home).join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let path: Vec<PathBuf> = env::split_paths(&path).map(|folder| folder.join("nvcc")).collect();
    named.into_iter().chain(homes).chain(path).find(|nvcc| nvcc.is_file())
}
