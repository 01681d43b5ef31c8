//! A recording of memory over time: `--memory-trace FILE.json`, with a chart in FILE.svg.
//!
//! A separate thread takes a [`Sample`] every 20 ms: resident memory as the kernel counts it, the bytes
//! that [`counting`] counts, and the [`Phase`] the run is in. Peaks, of the run and of each phase, are
//! kept from all samples; the samples themselves are thinned so that a long run fills no memory.

use std::{
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{Builder, JoinHandle},
    time::{Duration, Instant},
};

use engraft_util::atomic;
use serde_json::{Value, json};

use self::timeline::Timeline;
use super::{
    counting, machine,
    phase::{self, Phase},
};
use crate::error::{Error, Result};

mod plot;
mod timeline;

/// Time between two samples: 20 ms.
const EVERY: Duration = Duration::from_millis(20);
/// Most samples that are kept; a sample takes 48 bytes.
const KEPT: usize = 20_000;

/// Memory at one time, in bytes. Resident numbers are 0 if the system does not report them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Time since the recording began.
    pub seconds: f64,
    /// Resident bytes of the process.
    pub resident: u64,
    /// Resident bytes of heap, stacks and arenas.
    pub anonymous: u64,
    /// Resident bytes of mapped files.
    pub file: u64,
    /// Heap and arenas as the program counts them.
    pub counted: u64,
    /// The phase that the run was in.
    pub phase: Phase,
}

impl Sample {
    fn take(begun: Instant) -> Self {
        let resident = machine::resident();
        let part = |part: fn(&machine::Resident) -> u64| resident.as_ref().map_or(0, part);
        Self {
            seconds: begun.elapsed().as_secs_f64(),
            resident: part(|resident| resident.total),
            anonymous: part(|resident| resident.anonymous),
            file: part(|resident| resident.file),
            counted: counting::measured() as u64,
            phase: phase::current(),
        }
    }

    /// Peaks are of resident memory, or of the counted bytes where that is unknown.
    fn height(&self) -> (u64, u64) {
        (self.resident, self.counted)
    }
}

/// Refuses a path that no recording could be written to, before anything is recorded.
///
/// # Errors
/// [`Error::Input`] that names `--memory-trace`.
pub fn check(path: &Path) -> Result<()> {
    refuse_svg(path)?;
    let picture = path.with_extension("svg");
    [path, &picture].into_iter().try_for_each(|path| {
        atomic::check(path).map_err(|error| {
            Error::input(format!(
                "--memory-trace {}: cannot be written: {}; name a file in a folder that you may write to",
                path.display(),
                error.cause
            ))
        })
    })
}

fn refuse_svg(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg")) {
        return Err(Error::input(format!(
            "--memory-trace: {} ends as its picture would; name a file that ends in .json",
            path.display()
        )));
    }
    Ok(())
}

/// A running recording; ends when it is finished or dropped.
pub struct Trace {
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<TraceRecorder>>,
}

/// Memory over time, with its peaks.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceRecorder {
    /// Samples in order of time; where several were merged, the highest of them.
    pub samples: Vec<Sample>,
    /// The highest sample of all.
    pub peak: Option<Sample>,
    /// The highest sample of each phase the run was in.
    pub phases: Vec<Sample>,
    /// The kernel's own peak of resident memory in bytes, which includes peaks between two samples, since
    /// the process began.
    pub high_water: Option<u64>,
}

impl Trace {
    /// Starts a thread that records.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn start() -> Result<Self> {
        Self::start_with(EVERY, KEPT)
    }

    fn start_with(every: Duration, kept: usize) -> Result<Self> {
        let (stop, stopped) = channel();
        let thread = Builder::new()
            .name("memory-trace".into())
            .spawn(move || record(&stopped, every, kept))
            .map_err(|cause| {
                Error::failed(format!(
                    "--memory-trace: no thread can be started: {cause}; raise the limit of processes"
                ))
            })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Ends the recording and returns it.
    ///
    /// # Errors
    /// When the recording thread failed.
    pub fn finish(mut self) -> Result<TraceRecorder> {
        self.stop = None;
        let recording = self.thread.take().and_then(|thread| thread.join().ok());
        recording.ok_or_else(|| {
            Error::failed("--memory-trace: the recording stopped too early; please report this")
        })
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // the recording is dropped unread
        }
    }
}

fn record(stopped: &Receiver<()>, every: Duration, kept: usize) -> TraceRecorder {
    let begun = Instant::now();
    let mut timeline = Timeline::new(kept);
    loop {
        timeline.push(Sample::take(begun));
        if stopped.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    timeline.push(Sample::take(begun));
    timeline.finish(machine::resident().map(|resident| resident.peak))
}

impl TraceRecorder {
    /// Writes the recording to `path`, with the bytes `planned` for each phase and their peak `total`, and
    /// the picture to the same path with the ending `.svg`. Each file appears whole or not at all.
    ///
    /// # Errors
    /// When `path` itself ends in `.svg`, or a file cannot be written.
    pub fn write(&self, path: &Path, planned: &[(Phase, u64)], total: u64) -> Result<()> {
        refuse_svg(path)?;
        let svg = plot::svg(self, total)?;
        atomic::write(path, format!("{}\n", self.to_json(planned, total)).as_bytes())?;
        Ok(atomic::write(&path.with_extension("svg"), svg.as_bytes())?)
    }

    /// The form of the JSON file: bytes and seconds; samples as one list for each quantity.
    fn to_json(&self, planned: &[(Phase, u64)], total: u64) -> Value {
        let planned: Vec<_> =
            planned.iter().map(|(phase, bytes)| json!({ "moment": phase, "bytes": bytes })).collect();
        let one = |sample: &Sample| {
            json!({
                "moment": sample.phase,
                "seconds": millis(sample.seconds),
                "resident_bytes": sample.resident,
                "counted_bytes": sample.counted,
            })
        };
        json!({
            "planned": { "total_bytes": total, "moments": planned },
            "measured": {
                "peak": self.peak.as_ref().map(one),
                "moments": self.phases.iter().map(one).collect::<Vec<_>>(),
                "high_water_bytes": self.high_water,
            },
            "samples": {
                "seconds": self.list(|sample| millis(sample.seconds)),
                "resident_bytes": self.list(|sample| sample.resident),
                "anonymous_bytes": self.list(|sample| sample.anonymous),
                "file_bytes": self.list(|sample| sample.file),
                "counted_bytes": self.list(|sample| sample.counted),
                "moment": self.list(|sample| sample.phase),
            },
        })
    }

    fn list<T>(&self, of: impl Fn(&Sample) -> T) -> Vec<T> {
        self.samples.iter().map(of).collect()
    }
}

/// Rounded to milliseconds: further digits say nothing at 20 ms a sample.
fn millis(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests;
