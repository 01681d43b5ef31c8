//! One optimizer step, and evaluation.

pub mod evaluator;
pub mod trainer;

pub use evaluator::Evaluator;
pub use trainer::{Evaluation, StepReport, Trainer, TrainerOptions, VALUES};
