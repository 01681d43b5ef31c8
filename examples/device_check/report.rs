//! What the checks find, told line by line as it is found: a run that is cut short has told what it saw.

use std::path::PathBuf;

use engraft::{
    device::DType,
    error::{Error, Result},
};
use serde_json::{Value, json};

use crate::speed::Speed;

/// A result of the device beside the expected one.
pub struct Line {
    what: String,
    activations: DType,
    /// Largest error relative to the largest expected element, or to what `bound` is of.
    error: f64,
    bound: f64,
}

impl Line {
    /// A comparison with its outcome.
    pub fn new(what: impl Into<String>, activations: DType, error: f64, bound: f64) -> Self {
        Self { what: what.into(), activations, error, bound }
    }

    /// The same comparison, said to be of `what`.
    pub fn of(self, what: &str) -> Self {
        Self { what: format!("{what}, {}", self.what), ..self }
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

/// All that was found so far.
pub struct Report {
    device: String,
    json: PathBuf,
    lines: Vec<Line>,
    speeds: Vec<Speed>,
    failed: Vec<String>,
}

impl Report {
    /// A report on `device` that is also written to the file `json`; prints the head of the table.
    pub fn new(device: String, json: PathBuf) -> Self {
        println!("{device:<64} {:<5} {:>10} {:>10}", "type", "error", "bound");
        Self { device, json, lines: Vec::new(), speeds: Vec::new(), failed: Vec::new() }
    }

    /// Tells the comparisons of `what`. An error counts as a broken check, and the others go on.
    pub fn add(&mut self, what: &str, found: Result<Vec<Line>>) {
        for line in self.unless_failed(what, found) {
            println!("{}", line.shown());
            self.lines.push(line);
        }
    }

    /// Tells the speeds of `what`, as [`Report::add`].
    pub fn time(&mut self, what: &str, found: Result<Vec<Speed>>) {
        for speed in self.unless_failed(what, found) {
            println!("{:<72} {:>10.3} {}", speed.what, speed.value, speed.unit);
            self.speeds.push(speed);
        }
    }

    fn unless_failed<T>(&mut self, what: &str, found: Result<Vec<T>>) -> Vec<T> {
        found.unwrap_or_else(|error| {
            println!("{what}: FAILED: {error}");
            self.failed.push(format!("{what}: {error}"));
            Vec::new()
        })
    }

    /// Comparisons that do not hold, and errors.
    pub fn broken(&self) -> usize {
        self.lines.iter().filter(|line| !line.holds()).count() + self.failed.len()
    }

    /// Tells how many checks there were.
    pub fn close(&self) {
        println!("{} checks, {} broken", self.lines.len() + self.failed.len(), self.broken());
    }

    /// Writes all that was found so far.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self) -> Result<()> {
        let checks: Vec<Value> = self.lines.iter().map(Line::json).collect();
        let speed = |speed: &Speed| json!({ "what": speed.what, "value": speed.value, "unit": speed.unit });
        let speeds: Vec<Value> = self.speeds.iter().map(speed).collect();
        let json = json!({
            "device": self.device, "broken": self.broken(), "checks": checks, "failed": self.failed, "speeds": speeds,
        });
        std::fs::write(&self.json, format!("{json:#}\n")).map_err(|cause| {
            Error::failed(format!(
                "{}: cannot be written: {cause}; name another file with --json",
                self.json.display()
            ))
        })
    }
}
