//! Training.
pub mod trainer;

pub use trainer::{Evaluation, StepReport, Trainer, TrainerOptions, TrainerState, evaluate};
