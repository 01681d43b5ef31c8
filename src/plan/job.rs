//! The questions that a plan asks a job.

use std::fmt;

use super::{ByPhase, PlannedBase, PlannedDevice, Row, calibrate::Rates};
use crate::{device::arena::TableRow, error::Result};

/// Work whose memory is planned before it starts: a training run, a decoder, a server.
pub trait Job {
    /// One way to do it; its text is the options that ask for it.
    type Config: Copy + PartialEq + fmt::Debug + fmt::Display;

    /// The frozen base that it computes on.
    fn base(&self) -> PlannedBase<'_>;

    /// The device that would compute.
    fn device(&self) -> PlannedDevice;

    /// Whether blocks of the base are in memory only while they are used.
    fn streams_base(&self, config: Self::Config) -> bool;

    /// Every buffer that it would cut from arenas.
    ///
    /// # Errors
    /// When the job cannot be done with any amount of memory.
    fn buffers(&self, config: Self::Config) -> Result<Vec<TableRow>>;

    /// When a buffer is needed, in words for the table.
    fn lifetime(&self, buffer: &TableRow) -> &'static str;

    /// Bytes of buffers in a file that are in memory, by phase. `row` has all their bytes and their count.
    fn resident_of_file(&self, config: Self::Config, row: &Row) -> ByPhase;

    /// Memory that no arena holds: the process itself, data, lists.
    fn beside(&self, config: Self::Config) -> Vec<Row>;

    /// Bytes of the scratch that kernels share.
    fn scratch(&self, config: Self::Config) -> u64;
}

/// A job that can be done in several ways, which trade memory for time.
pub trait Candidates: Job {
    /// The ways to choose from.
    fn candidates(&self) -> Vec<Self::Config>;

    /// Seconds that `config` takes with the speeds `rates`.
    fn seconds(&self, config: Self::Config, rates: &Rates) -> f64;

    /// Factor on the predicted seconds before ways are compared, for time that the prediction leaves out.
    fn risk(&self, config: Self::Config) -> f64;

    /// Whether two ways differ only in sizes that rounding depends on, or not at all.
    fn are_alike(&self, one: Self::Config, other: Self::Config) -> bool;

    /// The options in which `other` differs from `now`, with the values of `other`.
    fn differences(&self, now: Self::Config, other: Self::Config) -> Vec<String>;

    /// Ways to take less memory than `now` does, some of which no choice considers unless they are asked
    /// for.
    fn savings(&self, now: Self::Config) -> Vec<Self::Config>;

    /// Options that change results more than rounding does, so that only a user may choose them.
    fn last_resorts(&self) -> Vec<LastResort<Self::Config>>;

    /// Names of the options, without dashes, that the user fixed and could release.
    fn fixed(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// The ways to choose from with these options released.
    fn released(&self) -> Vec<Self::Config> {
        Vec::new()
    }

    /// The work, for a sentence: `8 rows of up to 256 tokens`.
    fn title(&self) -> String;

    /// Hints for a user whose budget no way fits into.
    fn advice(&self) -> Vec<String>;
}

/// An option that is never chosen by itself, and the ways that it allows.
#[derive(Debug, Clone)]
pub struct LastResort<C> {
    /// The option with its value, without dashes.
    pub option: &'static str,
    /// The ways to choose from with it.
    pub candidates: Vec<C>,
}
