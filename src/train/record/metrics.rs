//! `metrics.jsonl`: a line for each event of a run, over all processes that trained it.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::line::{Line, Stamped};
use crate::{
    error::{Error, Result},
    train::pace::History,
};

/// Name of the file in a run folder.
const NAME: &str = "metrics.jsonl";

/// Path of the file in the run folder `folder`.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

/// The part of a file that a resumed run keeps.
#[derive(Debug, Default, PartialEq)]
pub struct Kept {
    /// Bytes from the beginning of the file.
    pub bytes: u64,
    /// What the kept lines say about the run.
    pub history: History,
}

/// The lines of `path` up to the step that a run goes on from: those before the first of a later step. The half line
/// that a killed process may leave is not among them. Nothing is kept where there is no file.
///
/// # Errors
/// Those of the system.
pub fn kept(path: &Path, step: u64) -> io::Result<Kept> {
    let mut kept = Kept::default();
    let file = match open(path) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(kept),
        file => file?,
    };
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = reader.read_until(b'\n', &mut bytes)?;
        if bytes.last() != Some(&b'\n') {
            return Ok(kept);
        }
        if let Ok(Stamped { line, .. }) = serde_json::from_slice(&bytes) {
            if line.step().is_some_and(|at| at > step) {
                return Ok(kept);
            }
            note(&line, &mut kept.history);
        }
        kept.bytes += read as u64;
    }
}

/// Opens a file of the disk: a device, say, may never end.
fn open(path: &Path) -> io::Result<File> {
    match std::fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("it is no file")),
    }
}

fn note(line: &Line, history: &mut History) {
    match line {
        Line::Step(step) => {
            history.smoothed.add(step.loss);
            history.elapsed = step.elapsed;
        }
        Line::Eval(eval) => history.elapsed = eval.elapsed,
        _ => {}
    }
}

/// Hands every whole line of the run in `folder` to `visit`, oldest first. Lines that are no JSON of ours are passed
/// over, and so is one that is being written at this moment.
///
/// # Errors
/// [`Error::Input`] where the folder has no record.
pub fn read(folder: &Path, visit: &mut dyn FnMut(Stamped)) -> Result<()> {
    let path = path(folder);
    let file = open(&path).map_err(|cause| match cause.kind() {
        io::ErrorKind::NotFound => Error::input(format!(
            "{}: holds no {NAME}; name the folder of a run, such as runs/embedded-lora",
            folder.display()
        )),
        _ => Error::reading(&path, &cause),
    })?;
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut bytes = Vec::new();
    while reader.read_until(b'\n', &mut bytes).map_err(|cause| Error::reading(&path, &cause))? > 0 {
        if bytes.last() == Some(&b'\n')
            && let Ok(stamped) = serde_json::from_slice(&bytes)
        {
            visit(stamped);
        }
        bytes.clear();
    }
    Ok(())
}
