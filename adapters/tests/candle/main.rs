//! PEFT adapters in candle models: against PEFT's own merges, finite differences and bad input.

mod folding;
mod layers;
mod models;
mod refusals;
mod support;
