//! Shows how far something long is: on a terminal a line that moves, else a line now and then.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use super::{
    bar,
    output::{Loudness, is_at_least, write_note},
};
use crate::data::{Progress, Watch};

/// Time until the first line, where there is no bar. A stage that ends sooner prints none.
const FIRST: Duration = Duration::from_secs(3);
/// Time between two such lines.
const NEXT: Duration = Duration::from_secs(10);
/// Time between two drawings of a bar.
const TICK: Duration = Duration::from_millis(250);
/// An estimate from less time than this is a guess.
const SURE: f64 = 0.3;

/// Whether standard error shows bars.
pub fn has_bars() -> bool {
    bar::is_possible() && is_at_least(Loudness::Normal)
}

/// Decides when something long is worth a line.
#[derive(Debug)]
pub struct Patience {
    began: Instant,
    said: Option<Instant>,
}

impl Patience {
    /// From now on.
    pub fn new() -> Self {
        Self { began: Instant::now(), said: None }
    }

    /// Whether a line is due; the next one is then due later.
    pub fn is_over(&mut self) -> bool {
        let due = match self.said {
            None => self.began.elapsed() >= FIRST,
            Some(said) => said.elapsed() >= NEXT,
        };
        if due {
            self.said = Some(Instant::now());
        }
        due
    }

    /// Seconds since it began.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

/// `reading data: 45%, 0:12 left`; without a total the time so far, once it is noticeable.
pub fn sentence(what: &str, done: u64, total: u64, seconds: f64) -> String {
    if total == 0 || done == 0 {
        return if seconds < 2.0 { what.to_owned() } else { format!("{what}: {} so far", clock(seconds)) };
    }
    let part = (done as f64 / total as f64).min(1.0);
    let percent = format!("{what}: {:.0}%", (part * 100.0).floor());
    if seconds < SURE {
        return percent;
    }
    format!("{percent}, {} left", clock(seconds * (1.0 - part) / part))
}

/// Seconds as `0:09`, `12:05` or `3:02:10`.
pub fn clock(seconds: f64) -> String {
    // The cast makes 0 of NaN and of what is below 0, and the largest number of infinity.
    let seconds = seconds.round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// A bar that shows a message beside something that turns.
pub fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {wide_msg}");
    let bar = bar::new();
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(TICK);
    bar
}

/// One long piece of work of a command, with a bar of its own. Nothing is shown before it says how far it is.
#[derive(Debug)]
pub struct Work {
    what: &'static str,
    shown: Mutex<Option<(Option<ProgressBar>, Patience)>>,
}

/// The content of a lock, also after a thread that held it has panicked.
fn open<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Work {
    /// Work that people know as `what`.
    pub fn new(what: &'static str) -> Self {
        Self { what, shown: Mutex::new(None) }
    }

    /// `done` of `total` units are done; a total of 0 is unknown.
    pub fn at(&self, done: u64, total: u64) {
        let mut shown = open(&self.shown);
        let (bar, patience) = shown.get_or_insert_with(|| (has_bars().then(spinner), Patience::new()));
        let text = || sentence(self.what, done, total, patience.seconds());
        match bar {
            Some(bar) => bar.set_message(text()),
            None => {
                let text = text();
                if patience.is_over() {
                    write_note(&text);
                }
            }
        }
    }
}

impl Work {
    /// The work is done, or rests: nothing of it is shown any more.
    pub fn end(&self) {
        if let Some((Some(bar), _)) = open(&self.shown).take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.end();
    }
}

/// Shows the reading of data until all is read. Of what has no known end, as the standard input, nothing is shown.
pub fn reading() -> Watch {
    let work = Work::new("reading data");
    Watch::new(move |Progress { done, total }| match done < total {
        true => work.at(done, total),
        false => work.end(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_on_a_clock() {
        let times = [0.4, 9.0, 59.6, 725.0, 10930.0, -3.0, f64::NAN].map(clock);
        assert_eq!(times, ["0:00", "0:09", "1:00", "12:05", "3:02:10", "0:00", "0:00"]);
    }

    #[test]
    fn an_estimate_needs_a_part_and_some_time() {
        assert_eq!(sentence("reading", 0, 0, 1.0), "reading");
        assert_eq!(sentence("reading", 0, 0, 65.0), "reading: 1:05 so far");
        assert_eq!(sentence("reading", 1, 4, 0.1), "reading: 25%");
        assert_eq!(sentence("reading", 1, 4, 10.0), "reading: 25%, 0:30 left");
        assert_eq!(sentence("reading", 5, 4, 10.0), "reading: 100%, 0:00 left");
    }

    #[test]
    fn what_is_quick_is_worth_no_line() {
        let mut patience = Patience::new();
        assert!(!patience.is_over());
        patience.began = Instant::now().checked_sub(FIRST).unwrap();
        assert!(patience.is_over() && !patience.is_over());
        patience.said = Instant::now().checked_sub(NEXT);
        assert!(patience.is_over());
    }
}
