//! Code that both programs use: options and their values, the environment, signals, opening a base, output.

pub mod adapters;
pub mod args;
pub mod bar;
pub mod download;
pub mod elsewhere;
pub mod environment;
mod failure;
pub mod kernels;
pub mod open;
pub mod options;
pub mod output;
pub mod program;
pub mod progress;
pub mod sample;
pub mod shell;
pub mod signals;
pub mod usage;
pub mod values;
