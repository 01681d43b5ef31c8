//! The record of a run in its folder: `metrics.jsonl` and TensorBoard's event files.
//!
//! A `Recorder` stands between the loop and the reporter and writes every event down before it passes it on. A
//! record that cannot be written, as on a full disk, does not end a run: that is said once, and later events are tried
//! again.

mod appender;
mod line;
pub mod metrics;
mod tensorboard;

use std::{
    io,
    path::{Path, PathBuf},
};

use self::{appender::Appender, tensorboard::EventFile};
pub use self::{
    line::{
        DataLine, DoneLine, ErrorLine, EvalLine, InterruptedLine, Line, NoteLine, PlanLine, ProgressLine,
        SampleLine, SaveLine, Stamped, StartLine, StepLine, now,
    },
    tensorboard::is_event_file,
};
use super::{Event, Reporter, RunFolder, pace::History};
use crate::error::{Error, Result};

/// A reporter that also writes the events into the run folder.
pub(super) struct Recorder<'a> {
    reporter: &'a mut dyn Reporter,
    folder: PathBuf,
    /// `None` before [`Recorder::open`], and where it cannot be opened.
    metrics: Option<Appender>,
    board: Board,
    /// Prompts of samples: each has a tag of its own in TensorBoard.
    prompts: Vec<String>,
    /// Whether a failure was reported.
    reported: bool,
}

/// TensorBoard's event file of this process, made when there is something to write.
#[derive(Debug)]
enum Board {
    /// Nothing is written there, because it cannot be.
    Closed,
    /// Not made yet; `purge` is the first step of which older files no longer count.
    Awaited {
        purge: Option<u64>,
    },
    Open(EventFile),
}

impl<'a> Recorder<'a> {
    /// A recorder that passes events on to `reporter` and writes nothing yet.
    pub fn new(reporter: &'a mut dyn Reporter) -> Self {
        Self {
            reporter,
            folder: PathBuf::new(),
            metrics: None,
            board: Board::Closed,
            prompts: Vec::new(),
            reported: false,
        }
    }

    /// Opens the record of the run in `folder`, which is claimed, for a run that goes on after `step` steps: what it
    /// says of later steps is cut off. Returns what it says of those before.
    pub fn open(&mut self, folder: &RunFolder, step: Option<u64>) -> Result<History> {
        self.folder = folder.path().to_owned();
        let path = metrics::path(folder.path());
        let opened = match step {
            None => Ok(metrics::Kept::default()),
            Some(step) => metrics::kept(&path, step),
        };
        let opened = opened.and_then(|kept| Ok((Appender::open(&path, kept.bytes)?, kept.history)));
        // The save holds `step`: TensorBoard keeps that one and drops those after it. A run that begins drops all.
        self.board = Board::Awaited { purge: Some(step.map_or(0, |step| step + 1)) };
        match opened {
            Ok((file, history)) => {
                self.metrics = Some(file);
                Ok(history)
            }
            Err(cause) => {
                self.report(&path, &cause)?;
                Ok(History::default())
            }
        }
    }

    /// Writes down the error that ends the run after `step` steps.
    pub fn failed(&mut self, step: u64, error: &Error) {
        if let Some(line) = Line::error(Some(step), error) {
            // There is nobody left to tell.
            let _ = self.write_line(line);
        }
    }

    fn write(&mut self, event: &Event<'_>) -> Result<()> {
        for line in Line::of(event) {
            if let Err(cause) = self.write_line(line) {
                self.report(&metrics::path(&self.folder), &cause)?;
            }
        }
        if let (Event::Saved(_) | Event::Interrupted(_) | Event::Done(_), Some(file)) = (event, &self.metrics)
        {
            // So that a crash of the machine does not leave a save whose steps are on no record.
            let _ = file.sync();
        }
        match self.draw(event) {
            Ok(()) => Ok(()),
            Err((path, cause)) => self.report(&path, &cause),
        }
    }

    fn write_line(&mut self, line: Line) -> io::Result<()> {
        match &mut self.metrics {
            Some(file) => file.append(Stamped::now(line).text().as_bytes()),
            None => Ok(()),
        }
    }

    /// Writes the event for TensorBoard, if it has a picture there.
    fn draw(&mut self, event: &Event<'_>) -> Result<(), (PathBuf, io::Error)> {
        if !matches!(event, Event::Step(_) | Event::Eval(_) | Event::Sample(_)) {
            return Ok(());
        }
        let time = now();
        if let Board::Awaited { purge } = self.board {
            // A folder without event files has nothing to drop.
            let purge = purge.filter(|_| has_event_files(&self.folder));
            self.board = match EventFile::create(&self.folder, time, purge) {
                Ok(file) => Board::Open(file),
                Err(cause) => {
                    self.board = Board::Closed;
                    return Err((self.folder.join("events.out.tfevents"), cause));
                }
            };
        }
        let prompt = match event {
            Event::Sample(sample) => self.number_of(&sample.prompt),
            _ => 0,
        };
        let Board::Open(file) = &mut self.board else { return Ok(()) };
        draw(file, time, event, prompt).map_err(|cause| (file.path().to_owned(), cause))
    }

    /// The number of a prompt, from 1.
    fn number_of(&mut self, prompt: &str) -> usize {
        let known = self.prompts.iter().position(|known| known == prompt);
        let index = known.unwrap_or_else(|| {
            self.prompts.push(prompt.to_owned());
            self.prompts.len() - 1
        });
        index + 1
    }

    /// Says once that the record has a gap.
    fn report(&mut self, path: &Path, cause: &io::Error) -> Result<()> {
        if std::mem::replace(&mut self.reported, true) {
            return Ok(());
        }
        self.reporter.event(&Event::Note(&format!(
            "{}: cannot be written: {cause}; training goes on, and its record has a gap",
            path.display()
        )))
    }
}

impl Reporter for Recorder<'_> {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        self.write(event)?;
        self.reporter.event(event)
    }
}

/// Tag in TensorBoard of the samples that are made when a run is over.
const LAST_SAMPLES: &str = "sample/before_and_after";

/// Adds samples to the record of a run in `folder` that is over.
///
/// # Errors
/// [`Error::Failed`] when they cannot be written.
pub fn add_samples(folder: &Path, samples: Vec<SampleLine>) -> Result<()> {
    let board = || -> io::Result<()> {
        let Some(mut file) = EventFile::newest(folder)? else { return Ok(()) };
        let mut add = |sample: &SampleLine| {
            file.text(now(), sample.step, LAST_SAMPLES, &markdown(&sample.prompt, &sample.text))
        };
        samples.iter().try_for_each(&mut add)
    };
    board().map_err(|cause| Error::writing(folder, &cause))?;
    let path = metrics::path(folder);
    let lines = || {
        let mut file = Appender::open(&path, u64::MAX)?;
        samples
            .into_iter()
            .try_for_each(|sample| file.append(Stamped::now(Line::Sample(sample)).text().as_bytes()))
    };
    lines().map_err(|cause| Error::writing(&path, &cause))
}

/// A prompt with its continuation. TensorBoard reads texts as Markdown, which shows indented lines as they are.
fn markdown(prompt: &str, text: &str) -> String {
    format!("    {}", format!("{prompt}{text}").replace('\n', "\n    "))
}

fn has_event_files(folder: &Path) -> bool {
    let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.any(|entry| is_event_file(&entry.file_name().to_string_lossy()))
}

/// The event's scalars, or the sample of that prompt, named as Transformers' Trainer names them.
fn draw(file: &mut EventFile, time: f64, event: &Event<'_>, prompt: usize) -> io::Result<()> {
    let memory = |bytes: Option<u64>| bytes.map(|bytes| ("memory/resident_bytes", bytes as f64));
    match event {
        Event::Step(step) => {
            let mut values = vec![
                ("train/loss", step.loss),
                ("train/learning_rate", step.lr),
                ("train/grad_norm", step.grad_norm),
                ("train/tokens_per_second", step.tokens_per_s),
                ("train/epoch", step.epoch),
            ];
            values.extend(memory(step.memory));
            file.scalars(time, step.step, &values)
        }
        Event::Eval(eval) => {
            let values = [("eval/loss", eval.loss), ("eval/perplexity", eval.perplexity())];
            file.scalars(time, eval.step, &values)
        }
        Event::Sample(sample) => {
            let text = markdown(&sample.prompt, &sample.text);
            file.text(time, sample.step, &format!("sample/{prompt}"), &text)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
