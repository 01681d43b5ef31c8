//! The report: a run's `metrics.jsonl` as an HTML page that needs nothing else.

mod chart;
mod history;
mod html;
mod one;
mod several;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use engraft_util::atomic;
use serde_json::{Value, json};

pub use self::history::History;
use crate::error::{Error, Result};

/// Name of a report.
const NAME: &str = "report.html";

/// Where the report of the run in `folder` is.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

/// Writes the report of the run in `folder` into it.
///
/// # Errors
/// When its record cannot be read, or the page not be written.
pub fn write(folder: &Path) -> Result<()> {
    let page = one::page(&History::read(folder)?)?;
    Ok(atomic::write(&path(folder), page.as_bytes())?)
}

/// Writes a page of `runs` to `to`, or to where it belongs: into the folder of a single run, else the current one.
/// Returns its path.
///
/// # Errors
/// When there is something else in its place, or it cannot be written.
pub fn write_of(runs: &[History], to: Option<&Path>) -> Result<PathBuf> {
    let place = match (to, runs) {
        (Some(to), _) => to.to_owned(),
        (None, [run]) => path(&run.folder),
        (None, _) => PathBuf::from(NAME),
    };
    refuse_other_file(&place)?;
    let page = match runs {
        [run] => one::page(run)?,
        runs => several::page(runs)?,
    };
    atomic::write(&place, page.as_bytes())?;
    Ok(place)
}

/// Refuses to replace a file that is no report.
fn refuse_other_file(place: &Path) -> Result<()> {
    match fs::read(place) {
        Ok(old) if String::from_utf8_lossy(&old[..old.len().min(4096)]).contains(html::GENERATOR) => Ok(()),
        Ok(_) => Err(Error::input(format!(
            "{}: is no report of engraft and is not replaced; name another file with --output",
            place.display()
        ))),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(cause) if cause.kind() == io::ErrorKind::IsADirectory => Err(Error::input(format!(
            "--output {}: is a folder; name a file such as {}",
            place.display(),
            place.join(NAME).display()
        ))),
        Err(cause) => Err(Error::reading(place, &cause)),
    }
}

/// The runs as a table for a terminal.
pub fn lines(runs: &[History]) -> String {
    several::lines(runs)
}

/// A run in numbers.
pub fn summary(run: &History) -> Value {
    let eval = run.last_eval();
    json!({
        "run": run.folder.display().to_string(),
        "state": run.state_text(),
        "step": run.done(),
        "steps": run.planned_steps(),
        "epoch": run.epoch,
        "smoothed_loss": run.steps.last().map(|point| point.smoothed),
        "eval_step": eval.map(|eval| eval.step),
        "eval_loss": eval.map(|eval| eval.loss),
        "perplexity": eval.and_then(|eval| eval.perplexity),
        "tokens_per_s": run.tokens_per_s(),
        "memory_bytes": run.peak(),
        "elapsed": run.elapsed,
        "remaining": run.remaining,
    })
}
