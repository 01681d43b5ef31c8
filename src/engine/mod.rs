//! One optimizer step, and evaluation.

pub mod before_update;
pub mod evaluator;
pub mod trainer;

pub use before_update::{BeforeUpdate, PendingUpdate};
pub use evaluator::{Evaluation, Evaluator};
pub use trainer::{StepReport, Trainer, TrainerOptions, VALUES};
