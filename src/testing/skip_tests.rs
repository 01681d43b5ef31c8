//! Tests that this machine cannot run say so. In a complete run none may be skipped that the machine could have run.

use std::{env, io::Write};

/// `.ci/run` sets it: a skip is then a fault wherever the hardware would have allowed the test.
const COMPLETE: &str = "ENGRAFT_TEST_COMPLETE";

/// Writes `skipped: why` to stderr, past the capture of the test runner. `could_run` says that the hardware has all
/// that the test needs, so that the program as it was built is the reason.
///
/// # Panics
/// In a complete run when the test could have run.
#[track_caller]
pub fn skip(why: &str, could_run: bool) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    let complete = env::var_os(COMPLETE).is_some();
    assert!(!(complete && could_run), "skipped, though this machine could run it: {why}");
}
