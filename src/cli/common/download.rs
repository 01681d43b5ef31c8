//! Shows the progress of downloads.

use std::cell::RefCell;

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::{bar, output::write_note, progress::has_bars};
use crate::hub::Progress;

/// Downloads in progress, on stderr: a bar on a terminal, else a line for each file.
pub struct Download {
    /// The file that is being fetched, with its bar.
    current: RefCell<Option<(String, Option<ProgressBar>)>>,
}

impl Download {
    /// Shows nothing until something is downloaded.
    pub fn new() -> Self {
        Self { current: RefCell::new(None) }
    }

    /// Shows how far a file is.
    pub fn show(&self, progress: &Progress) {
        let mut current = self.current.borrow_mut();
        if current.as_ref().is_none_or(|(file, _)| *file != progress.file) {
            *current = Some((progress.file.clone(), self.begin(progress)));
        }
        if let Some((_, Some(bar))) = &*current {
            bar.set_length(progress.total);
            bar.set_position(progress.bytes);
        }
    }

    fn begin(&self, progress: &Progress) -> Option<ProgressBar> {
        if !has_bars() {
            write_note(&format!("fetching {} ({})", progress.file, HumanBytes(progress.total)));
            return None;
        }
        let style = "{msg}  {bar:32} {bytes}/{total_bytes}  {eta} left";
        let style = ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
        Some(bar::new().with_style(style).with_message(progress.file.clone()))
    }
}
