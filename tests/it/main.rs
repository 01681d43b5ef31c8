//! Integration tests in one binary, a module for each topic.

mod autograd;
mod base;
mod base_files;
mod batches;
mod bf16;
mod by_hand;
mod candle_twins;
mod cli;
mod cli_config;
mod cli_data;
mod cli_input;
mod cli_support;
mod combine;
mod course;
mod decoder;
mod decoder_rows;
mod doctor;
mod embedding_parts;
mod finding;
mod golden;
mod hub;
mod hub_server;
mod imports;
mod interrupt;
mod limits;
mod ln_tuning;
mod memory;
mod merge;
mod optimizer;
mod output_scales;
mod policies;
mod prompts;
mod push;
mod push_server;
mod q8;
mod record;
mod remedies;
mod resume;
mod run_folder;
mod setup;
mod site_parts;
#[path = "../../src/testing/skip_tests.rs"]
mod skip;
mod source;
mod speed;
mod terminal;
mod tfevents;
mod tidy;
mod trained_norms;
mod virtual_tokens;

#[global_allocator]
static HEAP: engraft::observe::counting::Counting = engraft::observe::counting::Counting;
