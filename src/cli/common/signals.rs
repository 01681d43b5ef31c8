//! SIGINT and SIGTERM: before the loop they end the process, in the loop they ask it to save first.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Set when the loop should stop.
static STOP: AtomicBool = AtomicBool::new(false);
/// Whether a loop checks [`STOP`].
static WATCHED: AtomicBool = AtomicBool::new(false);

/// Exit code after a signal.
const INTERRUPTED: i32 = 130;

/// Installs the handler of both signals.
///
/// # Errors
/// When the system refuses it.
pub fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        // A second signal is from somebody who does not want to wait.
        if STOP.swap(true, Ordering::Relaxed) || !WATCHED.load(Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
    })
    .map_err(|cause| {
        Error::failed(format!("signals cannot be handled: {cause}; start the program from a shell"))
    })
}

/// From now on a signal sets the flag returned here.
pub fn watch() -> &'static AtomicBool {
    WATCHED.store(true, Ordering::Relaxed);
    &STOP
}
