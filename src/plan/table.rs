//! The plan: every buffer of a job with its size, place and lifetime, from sizes alone.
//!
//! A pure function of a [`Job`] and one way to do it: no weights, no data, no device. The buffers come
//! from the code that cuts them for a run, run against arenas that only count; what the base and the
//! device take is added here.

use super::{Job, PlannedDevice};
use crate::{
    device::{
        DType,
        arena::{Placement, TableRow},
    },
    error::Result,
    observe::phase::Phase,
};

/// Bytes in each phase, in the order of [`Phase::ALL`].
pub type ByPhase = [u64; Phase::ALL.len()];

/// The bytes that a function gives for each phase.
pub fn by_phase(bytes: impl Fn(Phase) -> u64) -> ByPhase {
    Phase::ALL.map(bytes)
}

/// Nothing while loading, then `bytes`: pages of zeros are in memory once they are touched.
pub fn from_the_first_pass(bytes: u64) -> ByPhase {
    by_phase(|phase| if phase == Phase::Loading { 0 } else { bytes })
}

/// One line of a plan: a buffer, or several alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// base, saved activations, workspace, trainables, moments, data, scratch, program ...
    pub role: &'static str,
    /// Its content; a number in a buffer's name is `*` where several are alike.
    pub name: String,
    /// Element type; `None` for memory without elements.
    pub dtype: Option<DType>,
    /// Shape of one of them, outermost first.
    pub shape: Vec<usize>,
    /// Number of alike buffers.
    pub count: usize,
    /// Bytes of all of them together.
    pub bytes: u64,
    /// Where they are; "memory" is the device's own, or the host's if it has none.
    pub place: Placement,
    /// When they are needed, in words.
    pub lifetime: &'static str,
    /// Bytes of them in the planned memory.
    pub(super) resident: ByPhase,
}

impl Row {
    /// Memory without elements that is resident in no phase.
    pub fn new(role: &'static str, name: &str, bytes: u64, place: Placement, lifetime: &'static str) -> Self {
        let name = name.to_owned();
        let resident = [0; Phase::ALL.len()];
        Self { role, name, dtype: None, shape: Vec::new(), count: 1, bytes, place, lifetime, resident }
    }

    /// The row with these bytes in the planned memory.
    #[must_use]
    pub fn with_resident(self, resident: ByPhase) -> Self {
        Self { resident, ..self }
    }

    /// The row with all its bytes in the planned memory, also while loading.
    #[must_use]
    pub fn always(self) -> Self {
        let bytes = self.bytes;
        self.with_resident(by_phase(|_| bytes))
    }

    /// The row with all its bytes in the planned memory once it is used.
    #[must_use]
    pub fn once_used(self) -> Self {
        let bytes = self.bytes;
        self.with_resident(from_the_first_pass(bytes))
    }

    /// Bytes of it that are in the planned memory in `phase`.
    pub fn resident(&self, phase: Phase) -> u64 {
        self.resident[phase as usize]
    }

    /// Most bytes of it that are ever in the planned memory.
    pub fn most_resident(&self) -> u64 {
        self.resident.iter().copied().max().unwrap_or(0)
    }

    fn is_like(&self, buffer: &TableRow, name: &str, place: Placement) -> bool {
        self.role == buffer.role
            && self.name == name
            && self.dtype == Some(buffer.dtype)
            && self.shape == buffer.shape
            && self.place == place
    }
}

/// The memory of one way to do a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan<C> {
    /// The way that was planned.
    pub config: C,
    /// All memory that it takes or that a device's plan lists.
    pub rows: Vec<Row>,
}

impl<C> Plan<C> {
    /// Bytes of the planned memory in `phase`.
    pub fn at(&self, phase: Phase) -> u64 {
        self.rows.iter().map(|row| row.resident(phase)).sum()
    }

    /// The phase with the most bytes, the first of several, and how many.
    pub fn peak(&self) -> (Phase, u64) {
        self.by_phase().into_iter().rev().max_by_key(|(_, bytes)| *bytes).unwrap_or((Phase::Loading, 0))
    }

    /// Most bytes that pass through the allocator or an arena: all but the process itself, the
    /// pages of the base and files.
    pub fn counted(&self) -> u64 {
        let counts = |row: &&Row| row.place == Placement::Host && !matches!(row.role, "base" | "program");
        self.rows.iter().filter(counts).map(|row| row.bytes).sum()
    }

    /// Bytes of the planned memory in each phase.
    pub fn by_phase(&self) -> [(Phase, u64); Phase::ALL.len()] {
        Phase::ALL.map(|phase| (phase, self.at(phase)))
    }

    /// Bytes that rows with one of these roles take at the peak.
    pub fn share(&self, roles: &[&str]) -> u64 {
        let (phase, _) = self.peak();
        self.rows.iter().filter(|row| roles.contains(&row.role)).map(|row| row.resident(phase)).sum()
    }
}

/// The plan of `job` done as `config` says.
///
/// # Errors
/// As [`Job::buffers`].
pub fn plan<J: Job>(job: &J, config: J::Config) -> Result<Plan<J::Config>> {
    let device = job.device();
    let mut rows = job.base().rows(device, job.streams_base(config));
    rows.extend(grouped(job, config)?);
    rows.extend(job.beside(config));
    rows.extend(
        device
            .own_memory()
            .map(|own| Row::new("program", own.runtime_name, own.runtime, Placement::Memory, "run").always()),
    );
    rows.push(scratch(device, job.scratch(config)));
    if device.own_memory().is_some() {
        let of_host = rows.iter_mut().filter(|row| row.place == Placement::Host);
        of_host.for_each(|row| row.resident = by_phase(|_| 0));
    }
    rows.retain(|row| row.bytes > 0);
    Ok(Plan { config, rows })
}

fn scratch(device: PlannedDevice, bytes: u64) -> Row {
    let name = if device.cores.is_some() { "tiles and packing of all threads" } else { "what kernels share" };
    Row::new("scratch", name, bytes, device.place(Placement::Memory), "op").once_used()
}

/// The buffers of the arenas, those that are alike in one line.
fn grouped<J: Job>(job: &J, config: J::Config) -> Result<Vec<Row>> {
    let buffers = job.buffers(config)?;
    let mut rows: Vec<Row> = Vec::new();
    for buffer in buffers.iter().filter(|buffer| buffer.bytes() > 0) {
        let name = without_numbers(&buffer.name);
        let place = job.device().place(buffer.place);
        let row = match rows.iter_mut().find(|row| row.is_like(buffer, &name, place)) {
            Some(row) => row,
            None => {
                rows.push(Row {
                    dtype: Some(buffer.dtype),
                    shape: buffer.shape.clone(),
                    count: 0,
                    ..Row::new(buffer.role, &name, 0, place, job.lifetime(buffer))
                });
                let last = rows.len() - 1;
                &mut rows[last]
            }
        };
        row.count += 1;
        row.bytes += buffer.bytes() as u64;
    }
    let resident = |row: &Row| match row.place {
        Placement::Disk => job.resident_of_file(config, row),
        Placement::Memory | Placement::Host => from_the_first_pass(row.bytes),
    };
    rows.iter_mut().for_each(|row| row.resident = resident(row));
    Ok(rows)
}

/// `block 11 qkv` as `block * qkv`.
fn without_numbers(name: &str) -> String {
    let words = name.split(' ').map(|word| if word.parse::<usize>().is_ok() { "*" } else { word });
    words.collect::<Vec<_>>().join(" ")
}
