//! Holds a CUDA device against the CPU side of every op, and trains a little on it.
//!
//!     cargo run --release --features cuda --example device_check -- [ORDINAL|cpu] [ops|runs]
//!
//! `cpu` holds the CPU side against itself: a check of this program, without a device. `ops` or `runs` alone make
//! one half of it.
//!
//! A table of relative errors goes to stderr, the same as one JSON object to stdout; exit code 1 when a bound is
//! broken. What is compared: each op at odd shapes and in every type of activations, a training whose loss must
//! fall, recompute bit for bit, and planned against held bytes.

mod ops;
mod runs;

use std::process::ExitCode;

use engraft::{
    error::Result,
    kernels::device::{DType, Device},
};
use serde_json::{Value, json};

/// One comparison.
pub struct Line {
    what: String,
    activations: DType,
    /// Largest error relative to the largest expected element, or whatever `bound` is of.
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
            "{:<44} {:<5} {:>10.2e} {:>10.2e}  {verdict}",
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

/// Opens the device, and tells the types of activations that it computes in, the usual one first.
fn open(name: &str) -> Result<(Device, String, &'static [DType])> {
    if name == "cpu" {
        return Ok((Device::Cpu, "the CPU itself".to_owned(), &[DType::F32]));
    }
    let device = Device::cuda(name.parse().unwrap_or(0))?;
    let name = if let Device::Cuda(gpu) = device { gpu.name() } else { String::new() };
    Ok((device, format!("{name} ({})", device.dispatch()), &[DType::F16, DType::BF16, DType::F32]))
}

fn check(name: &str, part: &str) -> Result<(String, Vec<Line>)> {
    let (device, name, types) = open(name)?;
    let mut lines = Vec::new();
    // The trainings first: what they hold is compared with their plan before anything else was there.
    if part != "ops" {
        lines.extend(runs::check(device, types)?);
    }
    if part != "runs" {
        lines.extend(ops::check(device, types)?);
    }
    Ok((name, lines))
}

fn main() -> ExitCode {
    let argument = |at| std::env::args().nth(at).unwrap_or_default();
    let (name, lines) = match check(&argument(1), &argument(2)) {
        Ok(found) => found,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(error.exit_code().max(1));
        }
    };
    eprintln!("{:<44} {:<5} {:>10} {:>10}", name, "type", "error", "bound");
    lines.iter().for_each(|line| eprintln!("{}", line.shown()));
    let broken = lines.iter().filter(|line| !line.holds()).count();
    eprintln!("{} checks, {broken} broken", lines.len());
    let checks: Vec<Value> = lines.iter().map(Line::json).collect();
    println!("{}", json!({ "device": name, "broken": broken, "checks": checks }));
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
