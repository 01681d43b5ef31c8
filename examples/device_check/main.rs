//! Compares every op on a CUDA device with its CPU side, trains on the device, and compares its memory with the plans.
//!
//!     cargo run --release --features cuda --example device_check -- [DEVICE] [PART..] [--large|--small] [--json FILE]
//!         [--base FOLDER] [--golden FOLDER] [--wait]
//!
//! DEVICE is a number or `cpu`, which holds the CPU side against itself: a check of this program, without a device.
//! A PART is `ops` (every op at odd shapes, in every type of activations), `memory` (held against planned bytes, and a
//! training that does not fit), `golden` (what PEFT computed), `runs` (trainings: losses and gradients of every kind of
//! adapter, recompute, micro-batches, 8-bit moments, resume, generation) or `codes` (some of these on 8-bit and 4-bit
//! bases); none stands for all of these, in this order.
//! `apart` makes 200 steps with fused ops beside 200 with each step of an op a launch of its own.
//! `speed` times products, attention, updates and the tokens of the base in FOLDER, and checks nothing. On the driver of
//! `cuda-shim/driver` trainings are tiny, on a real device larger: `--large` and `--small` choose.
//!
//! The golden files are those of --golden, or else of `tests/golden` in the working folder, or where the program was
//! built. `--wait` waits after each launch: a fault then names the kernel or product that made it. The variable
//! ENGRAFT_KERNELS names a folder with images of kernels, which come before the built-in ones (docs/MANUAL.md).
//!
//! Every line of the table of relative errors goes to stdout as soon as it is known, the same as one JSON object into FILE
//! after each part, target/device_check.json where none is named. An error ends its part, not the others; exit code 1
//! when a bound is broken or a part failed.

mod allocation;
mod decoding;
mod embedding;
mod golden;
mod inputs;
mod linears;
mod memory;
mod ops;
mod report;
mod runs;
mod setup;
mod speed;
mod wide;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use engraft::{
    device::{DType, Device},
    error::{Error, Result},
};
use report::{Line, Report};
use setup::Size;

/// The parsed command line.
struct Options {
    device: String,
    parts: Vec<String>,
    size: Option<Size>,
    json: PathBuf,
    base: Option<PathBuf>,
    waits: bool,
}

const PARTS: [&str; 7] = ["ops", "memory", "golden", "runs", "codes", APART, SPEED];
const APART: &str = "apart";
const SPEED: &str = "speed";

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let json = PathBuf::from("target/device_check.json");
        let mut options =
            Self { device: "0".to_owned(), parts: Vec::new(), size: None, json, base: None, waits: false };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--large" => options.size = Some(Size::LARGE),
                "--small" => options.size = Some(Size::SMALL),
                "--json" => {
                    let file = arguments.next();
                    options.json =
                        file.ok_or_else(|| Error::input("--json: names no file; give one"))?.into();
                }
                "--base" => {
                    let folder = arguments.next();
                    let folder = folder.ok_or_else(|| Error::input("--base: names no folder; give one"))?;
                    options.base = Some(folder.into());
                }
                "--golden" => {
                    let folder = arguments.next();
                    setup::golden_is_in(
                        folder.ok_or_else(|| Error::input("--golden: names no folder; give one"))?.into(),
                    );
                }
                "--wait" => options.waits = true,
                part if PARTS.contains(&part) => options.parts.push(argument),
                device if device == "cpu" || device.parse::<usize>().is_ok() => options.device = argument,
                other => {
                    return Err(Error::input(format!(
                        "{other}: is no device and no part; give a number or cpu, and some of {}",
                        PARTS.join(", ")
                    )));
                }
            }
        }
        Ok(options)
    }

    fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() && part != SPEED && part != APART
            || self.parts.iter().any(|wanted| wanted == part)
    }
}

/// Names a folder with images of kernels, as for the programs.
const KERNELS: &str = "ENGRAFT_KERNELS";

/// Name of the device of cuda-shim/driver.
const INTERPRETED: &str = "shim";

/// Has the images `OP.fatbin` of a folder taken instead of the built-in ones, and tells each.
fn take_kernels(folder: &Path) -> Result<()> {
    let unreadable =
        |cause| Error::input(format!("{}: cannot be read: {cause}; correct {KERNELS}", folder.display()));
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "fatbin") {
            let code = std::fs::read(&path).map_err(unreadable)?;
            println!("kernels of {} are those of {}", Device::take_kernels(&path, &code)?, path.display());
        }
    }
    Ok(())
}

/// Opens the device, and returns its name, the types of activations that it computes in, the usual one first, and the
/// default size.
fn open(name: &str) -> Result<(Device, String, &'static [DType], Size)> {
    if name == "cpu" {
        return Ok((Device::Cpu, "the CPU itself".to_owned(), &[DType::F32], Size::SMALL));
    }
    if let Some(folder) = std::env::var_os(KERNELS).filter(|folder| !folder.is_empty()) {
        take_kernels(Path::new(&folder))?;
    }
    let device = Device::cuda(name.parse().unwrap_or(0))?;
    let name = if let Device::Cuda(gpu) = device { gpu.name() } else { String::new() };
    let size = if name == INTERPRETED { Size::SMALL } else { Size::LARGE };
    Ok((
        device,
        format!("{name} ({})", device.dispatch(DType::F16)),
        &[DType::F16, DType::BF16, DType::F32],
        size,
    ))
}

fn check(options: &Options) -> Result<usize> {
    let (device, name, types, size) = open(&options.device)?;
    if options.waits {
        device.wait_after_each_launch();
    }
    let size = options.size.unwrap_or(size);
    let mut report = Report::new(name, options.json.clone());
    for part in PARTS.into_iter().filter(|part| options.wants(part)) {
        let start = Instant::now();
        let done = match part {
            "ops" => ops::check(device, types, &mut report),
            "memory" => memory::check(device, types, size, &mut report),
            "golden" => golden::check(device, types, size, &mut report),
            "runs" => runs::check(device, types, size, &mut report),
            "codes" => runs::check_codes(device, types, size, &mut report),
            APART => runs::apart(device, types, size, &mut report),
            _ => speed::measure(device, types, size, options.base.as_deref(), &mut report),
        };
        report.add(part, done.map(|()| Vec::new()));
        eprintln!("{part}: {:.1} s", start.elapsed().as_secs_f64());
        report.write()?;
    }
    setup::clean();
    report.close();
    Ok(report.broken())
}

fn main() -> ExitCode {
    let options = Options::read(std::env::args().skip(1));
    match options.and_then(|options| check(&options)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code().max(1))
        }
    }
}
