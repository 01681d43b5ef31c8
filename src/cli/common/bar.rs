//! Progress bars that never take more than one row, so that they erase nothing else.
//!
//! A bar that is wider than its window is wrapped. When the window grows again the terminal joins the rows, and a
//! bar that clears as many rows as it once had clears a result above it. So a bar is cut to the window, and the
//! cursor never goes up.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use console::{Term, is_dumb, measure_text_width, truncate_str};
use indicatif::{ProgressBar, ProgressDrawTarget, TermLike, WeakProgressBar};

/// Drawings a second, at most.
const HERTZ: u8 = 20;

/// The bar that is shown now, for those that write beside it from elsewhere.
static SHOWN: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Whether standard error is a terminal that can draw a row again: neither `TERM=dumb` nor none.
pub fn is_possible() -> bool {
    Term::stderr().is_term() && !is_dumb()
}

/// A bar of unknown length on standard error. Text is written above it through [`ProgressBar::suspend`] or
/// [`write_above`], not `println`, whose lines would be cut to the window.
pub fn new() -> ProgressBar {
    let row = OneRow { term: Term::buffered_stderr(), used: Mutex::new(0) };
    let target = match is_possible() {
        true => ProgressDrawTarget::term_like_with_hz(Box::new(row), HERTZ),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(None, target);
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
    bar
}

/// Runs `write` while no bar is shown; the bar of another thread waits meanwhile.
pub fn write_above(write: impl FnOnce()) {
    match shown() {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Clears the bar for good, before a process ends that nobody cleans up after.
pub fn clear() {
    if let Some(bar) = shown() {
        bar.finish_and_clear();
    }
}

fn shown() -> Option<ProgressBar> {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    shown.and_then(|bar| bar.upgrade()).filter(|bar| !bar.is_finished())
}

/// One row of a terminal, with the columns that are used of it.
#[derive(Debug)]
struct OneRow {
    term: Term,
    used: Mutex<usize>,
}

impl TermLike for OneRow {
    /// A column less than the window has: a full row would be wrapped as soon as the window shrinks.
    fn width(&self) -> u16 {
        self.term.size().1.saturating_sub(1).max(1)
    }

    fn height(&self) -> u16 {
        self.term.size().0
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, columns: usize) -> io::Result<()> {
        self.term.move_cursor_right(columns)
    }

    fn move_cursor_left(&self, columns: usize) -> io::Result<()> {
        self.term.move_cursor_left(columns)
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.term.write_line(text)
    }

    /// Writes what the row has room for; not the spaces that would fill it, which say nothing.
    fn write_str(&self, text: &str) -> io::Result<()> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if text.trim_matches(' ').is_empty() {
            return Ok(());
        }
        let cut = truncate_str(text, usize::from(self.width()).saturating_sub(*used), "");
        *used += measure_text_width(&cut);
        self.term.write_str(&cut)
    }

    fn clear_line(&self) -> io::Result<()> {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = 0;
        self.term.clear_line()
    }

    fn flush(&self) -> io::Result<()> {
        self.term.flush()
    }
}
