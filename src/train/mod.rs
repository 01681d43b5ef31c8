//! Training: the run as prose, its folder, its saves.

pub mod adapter;
pub mod events;
mod fit;
pub mod folder;
pub mod options;
mod prepare;
mod resume;
pub mod run;
pub mod save;

pub use adapter::{AdapterOptions, Kinds, PrefixStart};
pub use events::{Event, Reporter};
pub use fit::{Draft, cpu, draft};
pub use folder::RunFolder;
pub use options::{DataSource, Length, Machine, RunOptions, Warmup};
pub use prepare::{brings_valid, end_of_text, load_split, row_limit};
pub use run::{Finished, run};
