//! The last sentence of a program that cannot go on: no memory, or a fault of its own.

use std::{
    io::{self, Write},
    panic::{self, PanicHookInfo},
    path::Path,
    process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use engraft_util::{panics, unfinished};

use crate::observe::counting;

/// Exit code of a program that failed while running.
const FAILED: i32 = 1;

/// Set by the first thread that ends the process.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Has every failed allocation and every panic end the process with a sentence and exit code 1.
pub fn install() {
    counting::on_exhaustion(out_of_memory);
    panic::set_hook(Box::new(on_panic));
}

/// Ends the process; allocates nothing, because there is nothing left.
fn out_of_memory(bytes: usize) -> ! {
    only_once();
    let mut text = [0u8; 256];
    let mut rest = &mut text[..];
    let _ = writeln!(
        rest,
        "error: the system has no more memory for this program ({} MiB were asked for); free some, or raise its limit \
         (`ulimit -v`)",
        bytes.div_ceil(1 << 20)
    );
    let left = rest.len();
    let _ = io::stderr().write_all(&text[..text.len() - left]);
    process::exit(FAILED)
}

fn on_panic(info: &PanicHookInfo) {
    if panics::is_expected() {
        return;
    }
    only_once();
    unfinished::remove_all();
    let what = info.payload_as_str().unwrap_or("no reason given");
    // Messages of std and of crates have several lines.
    let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
    let place = info.location().map_or(String::new(), |at| {
        let file = Path::new(at.file()).file_name().unwrap_or_default();
        format!(" ({}, line {})", file.to_string_lossy(), at.line())
    });
    let _ = writeln!(io::stderr(), "error: the program failed: {what}{place}; please report this");
    process::exit(FAILED)
}

/// Lets one thread end the process, and the others wait for that.
fn only_once() {
    if ENDING.swap(true, Ordering::Relaxed) {
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    }
}
