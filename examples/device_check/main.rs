//! Compares every op on a CUDA device with its CPU side, trains on the device, and compares its memory with the plans.
//!
//!     cargo run --release --features cuda --example device_check -- [DEVICE] [PART..] [--large|--small] [--json FILE]
//!         [--base FOLDER]
//!
//! DEVICE is a number, or `cpu`, which compares the CPU side with itself: a check of this program, without a device.
//! A PART is `ops` (every op at odd shapes, in every type of activations), `runs` (trainings: losses and gradients
//! of every kind of adapter, recompute, micro-batches, 8-bit moments, resume, generation), `golden` (what PEFT
//! computed, tests/golden) or `memory` (used against planned bytes, and a training that does not fit); the default is
//! all of these. `speed` measures products, attention, updates and the tokens of the base in FOLDER, and checks nothing.
//! On the driver of `cuda-shim/driver` trainings are tiny, on a real device larger: `--large` and `--small`
//! choose.
//!
//! A table of relative errors goes to stdout, the same as one JSON object into FILE, target/device_check.json where none
//! is named; exit code 1 when a bound is broken.

mod golden;
mod memory;
mod ops;
mod runs;
mod setup;
mod speed;
mod wide;

use std::{path::PathBuf, process::ExitCode, time::Instant};

use engraft::{
    device::{DType, Device},
    error::{Error, Result},
};
use serde_json::{Value, json};
use setup::Size;
use speed::Speed;

/// The result of one comparison.
pub struct Line {
    what: String,
    activations: DType,
    /// Largest error relative to the largest expected element, or another number with the meaning of `bound`.
    error: f64,
    bound: f64,
}

impl Line {
    /// A comparison with its outcome.
    pub fn new(what: impl Into<String>, activations: DType, error: f64, bound: f64) -> Self {
        Self { what: what.into(), activations, error, bound }
    }

    fn holds(&self) -> bool {
        self.error <= self.bound
    }

    fn shown(&self) -> String {
        let verdict = if self.holds() { "ok" } else { "BROKEN" };
        format!(
            "{:<64} {:<5} {:>10.2e} {:>10.2e}  {verdict}",
            self.what,
            format!("{:?}", self.activations),
            self.error,
            self.bound
        )
    }

    fn json(&self) -> Value {
        json!({
            "check": self.what, "activations": format!("{:?}", self.activations),
            "error": if self.error.is_finite() { json!(self.error) } else { json!(self.error.to_string()) },
            "bound": self.bound, "ok": self.holds(),
        })
    }
}

/// The parsed command line.
struct Options {
    device: String,
    parts: Vec<String>,
    size: Option<Size>,
    json: PathBuf,
    base: Option<PathBuf>,
}

const PARTS: [&str; 5] = ["ops", "runs", "golden", "memory", SPEED];
const SPEED: &str = "speed";

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let json = PathBuf::from("target/device_check.json");
        let mut options = Self { device: "0".to_owned(), parts: Vec::new(), size: None, json, base: None };
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
        self.parts.is_empty() && part != SPEED || self.parts.iter().any(|wanted| wanted == part)
    }
}

/// Name of the device of cuda-shim/driver.
const INTERPRETED: &str = "shim";

/// Opens the device, and returns its name, the types of activations that it computes in, the usual one first, and the
/// default size.
fn open(name: &str) -> Result<(Device, String, &'static [DType], Size)> {
    if name == "cpu" {
        return Ok((Device::Cpu, "the CPU itself".to_owned(), &[DType::F32], Size::SMALL));
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

fn check(options: &Options) -> Result<(String, Vec<Line>, Vec<Speed>)> {
    let (device, name, types, size) = open(&options.device)?;
    let size = options.size.unwrap_or(size);
    let mut lines = Vec::new();
    // Memory first, before anything else is allocated.
    for part in ["memory", "golden", "runs", "ops"].into_iter().filter(|part| options.wants(part)) {
        let start = Instant::now();
        lines.extend(match part {
            "memory" => memory::check(device, types, size)?,
            "golden" => golden::check(device, types, size)?,
            "runs" => runs::check(device, types, size)?,
            _ => ops::check(device, types)?,
        });
        eprintln!("{part}: {:.1} s", start.elapsed().as_secs_f64());
    }
    let wanted = options.wants(SPEED);
    let speeds =
        if wanted { speed::measure(device, types, size, options.base.as_deref())? } else { Vec::new() };
    setup::clean();
    Ok((name, lines, speeds))
}

fn main() -> ExitCode {
    let refused = |error: Error| {
        eprintln!("error: {error}");
        ExitCode::from(error.exit_code().max(1))
    };
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => return refused(error),
    };
    let (name, lines, speeds) = match check(&options) {
        Ok(found) => found,
        Err(error) => return refused(error),
    };
    println!("{:<64} {:<5} {:>10} {:>10}", name, "type", "error", "bound");
    lines.iter().for_each(|line| println!("{}", line.shown()));
    let broken = lines.iter().filter(|line| !line.holds()).count();
    println!("{} checks, {broken} broken", lines.len());
    speeds.iter().for_each(|Speed { what, value, unit }| println!("{what:<72} {value:>10.3} {unit}"));
    let checks: Vec<Value> = lines.iter().map(Line::json).collect();
    let speeds: Vec<Value> = speeds
        .iter()
        .map(|speed| json!({ "what": speed.what, "value": speed.value, "unit": speed.unit }))
        .collect();
    let json = json!({ "device": name, "broken": broken, "checks": checks, "speeds": speeds });
    if let Err(cause) = std::fs::write(&options.json, format!("{json:#}\n")) {
        return refused(Error::failed(format!(
            "{}: cannot be written: {cause}; name another file with --json",
            options.json.display()
        )));
    }
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
