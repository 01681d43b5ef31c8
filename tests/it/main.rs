//! Integration tests, one binary: a module a topic.

mod base;
mod base_files;
mod golden;
mod hub;
mod hub_server;
