//! SIGINT and SIGTERM: before and after the loop they end the process, in the loop they ask it to save first.

use std::{
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use engraft_util::unfinished;

use super::{bar, output::write_error};
use crate::error::{Error, Result};

/// Set when the loop should stop.
static STOP: AtomicBool = AtomicBool::new(false);
/// Whether a loop checks [`STOP`].
static WATCHED: AtomicBool = AtomicBool::new(false);
/// The sentence for a process that ends at its first signal.
static FAREWELL: Mutex<&str> = Mutex::new("interrupted");

/// Exit code after a signal.
const INTERRUPTED: i32 = 130;

/// Time that a sentence has to be written.
const PATIENCE: Duration = Duration::from_millis(300);

const SAVING: &str = "finishing this step, then saving; Ctrl-C again stops without saving";

/// Installs the handler of both signals. Until [`watch`] they end the process; files that were not finished
/// are removed.
///
/// # Errors
/// When the system refuses it.
pub fn install() -> Result<()> {
    ctrlc::set_handler(on_signal).map_err(|cause| {
        Error::failed(format!(
            "signals cannot be handled: {cause}; raise the limits of threads and memory (`ulimit -u`, `ulimit -v`)"
        ))
    })
}

/// Runs in a thread of its own, not in the signal's context.
fn on_signal() {
    let is_first = !STOP.swap(true, Ordering::Relaxed);
    if is_first && WATCHED.load(Ordering::Relaxed) {
        return patiently(|| bar::write_above(|| write_error(SAVING)));
    }
    unfinished::remove_all();
    // Somebody who sends a second signal knows what happens.
    let farewell = is_first.then(|| *FAREWELL.lock().unwrap_or_else(PoisonError::into_inner));
    patiently(move || {
        bar::clear();
        farewell.into_iter().for_each(write_error);
    });
    process::exit(INTERRUPTED);
}

/// Waits for `write` only so long: a pipe may be full, and the next signal has to end the process.
fn patiently(write: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let writer = thread::Builder::new().spawn(move || {
        write();
        let _ = done.send(());
    });
    if writer.is_ok() {
        let _ = is_done.recv_timeout(PATIENCE);
    }
}

/// The flag that a signal sets. A signal still ends the process, until [`watch`].
pub fn flag() -> &'static AtomicBool {
    &STOP
}

/// From now on the first signal sets the flag, and nothing else.
pub fn watch() {
    WATCHED.store(true, Ordering::Relaxed);
}

/// From now on the first signal ends the process, after the sentence `farewell`.
pub fn end_at_once(farewell: &'static str) {
    *FAREWELL.lock().unwrap_or_else(PoisonError::into_inner) = farewell;
    WATCHED.store(false, Ordering::Relaxed);
}
