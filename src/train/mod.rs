//! Training: the run as prose, its folder, its saves.

pub mod adapter;
pub mod card;
pub mod events;
pub mod folder;
mod job;
mod memory;
pub mod options;
pub mod pace;
mod prepare;
mod progress;
pub mod record;
mod resume;
pub mod run;
pub mod sample;
pub mod save;
mod steps;

pub use adapter::{AdaLoraOptions, AdapterOptions, PrefixStart, PromptStart};
pub use events::{Event, Reporter};
pub use folder::RunFolder;
pub use job::{Constraints, PlanConfig, TrainingJob};
pub use memory::{PlanRequest, plan_request};
pub use options::{DataSource, Length, RunOptions, Warmup};
pub use prepare::{RowOptions, brings_valid, embedded_text, end_of_text, load_rows, load_split, row_limit};
pub use run::{Finished, run};
pub use sample::{Continuation, Sampling};
