//! The plan: every buffer of a run with its size, place and lifetime, from sizes alone.
//!
//! A pure function of a [`Job`] and a [`Setting`]: no weights, no data, no device. The buffers come
//! from the very code that cuts them for a run, run against arenas that only count; what the base,
//! the kernels' scratch and the rows of a step take is added here.

use std::fmt;

use engraft_adapters::AdapterSet;
use engraft_util::atomic::BUFFER;

pub use super::base_bytes::BaseBytes;
use crate::observe::phase::Moment;
use crate::{
    device::{
        DType,
        arena::{Place, TableRow},
    },
    engine::{Trainer, TrainerOptions},
    error::Result,
    kernels::matmul::Arithmetic,
    model::{BaseDType, Config, Policy, scratch},
    optim::{AdamWOptions, OptimizerKind},
};

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The host's cores: one memory for everything, code and runtime included.
    Cpu {
        /// Threads of the pool.
        threads: usize,
        /// What frozen products and attention are computed in.
        arithmetic: Arithmetic,
    },
    /// A CUDA device, whose memory is planned; what stays on the host is listed beside it.
    Cuda,
}

impl Target {
    /// Where what is moved out of its memory goes.
    pub fn away(self) -> Place {
        match self {
            Self::Cpu { .. } => Place::Disk,
            Self::Cuda => Place::Host,
        }
    }
}

/// What is to be done, whatever the machine.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// Sizes of the base.
    pub config: &'a Config,
    /// What its matrices are kept in.
    pub base_dtype: BaseDType,
    /// The adapter.
    pub set: &'a AdapterSet,
    /// Rows per optimizer step.
    pub batch: usize,
    /// Tokens of the longest row.
    pub seq_len: usize,
    /// What computes.
    pub target: Target,
    /// Bytes of code, runtime, tokenizer and whatever else the process holds beside the plan.
    pub program: u64,
    /// Bytes of tokenised rows on the heap.
    pub rows_on_heap: u64,
    /// Whether the base lies in a file that can be streamed.
    pub streamable: bool,
}

/// One way to do a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Rows at a time.
    pub micro_batch: usize,
    /// Recompute, chunks, streaming, places.
    pub policy: Policy,
    /// How the optimizer keeps its moments.
    pub optimizer: OptimizerKind,
}

/// As options are written.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Policy { recompute, head_rows, stream, inputs, moments, .. } = self.policy;
        let on = |flag: bool| if flag { "on" } else { "off" };
        write!(
            f,
            "--micro-batch {} --recompute {recompute} --head-rows {head_rows} --stream-base {} --offload-inputs {} \
             --offload-optimizer {} --optimizer {}",
            self.micro_batch,
            on(stream),
            on(inputs.is_away()),
            on(moments.is_away()),
            self.optimizer.name()
        )
    }
}

/// Where a buffer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// Memory of the device.
    Device,
    /// Memory of the host.
    Host,
    /// A file.
    Disk,
}

impl Home {
    /// Its name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "file",
        }
    }
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

pub(super) const MOMENTS: usize = Moment::ALL.len();

/// One line of a plan: a buffer, or several alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// base, saved activations, workspace, trainables, moments, data, scratch, program ...
    pub role: &'static str,
    /// What it holds; a number in a buffer's name is `*` where several are alike.
    pub name: String,
    /// Element type; `None` for memory without elements.
    pub dtype: Option<DType>,
    /// Shape of one of them, outermost first.
    pub shape: Vec<usize>,
    /// How many there are.
    pub count: usize,
    /// Bytes of all.
    pub bytes: u64,
    /// Where they live.
    pub home: Home,
    /// When they are needed.
    pub lifetime: &'static str,
    /// Bytes of them in the planned memory, by moment.
    resident: [u64; MOMENTS],
}

impl Row {
    /// Bytes of it that are in the planned memory in `moment`.
    pub fn resident(&self, moment: Moment) -> u64 {
        self.resident[moment as usize]
    }

    /// Most bytes of it that are ever in the planned memory.
    pub fn most_resident(&self) -> u64 {
        self.resident.iter().copied().max().unwrap_or(0)
    }
}

/// All of them, with their sums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What was planned for.
    pub setting: Setting,
    /// The buffers.
    pub rows: Vec<Row>,
}

impl Plan {
    /// Bytes in `moment`.
    pub fn at(&self, moment: Moment) -> u64 {
        self.rows.iter().map(|row| row.resident(moment)).sum()
    }

    /// The moment with the most bytes, and how many.
    pub fn peak(&self) -> (Moment, u64) {
        let moments = Moment::ALL.map(|moment| (moment, self.at(moment)));
        // Of equal moments the first one.
        moments.into_iter().rev().max_by_key(|(_, bytes)| *bytes).unwrap_or((Moment::Loading, 0))
    }

    /// Most bytes that pass through the allocator or an arena: all but what the process had before, the
    /// pages of the base and what lies in files.
    pub fn counted(&self) -> u64 {
        let counts = |row: &&Row| row.home == Home::Host && !matches!(row.role, "base" | "program");
        self.rows.iter().filter(counts).map(|row| row.bytes).sum()
    }

    /// Bytes of each moment.
    pub fn moments(&self) -> [(Moment, u64); MOMENTS] {
        Moment::ALL.map(|moment| (moment, self.at(moment)))
    }

    /// Bytes that rows with one of these roles take at the peak.
    pub fn share(&self, roles: &[&str]) -> u64 {
        let (moment, _) = self.peak();
        self.rows.iter().filter(|row| roles.contains(&row.role)).map(|row| row.resident(moment)).sum()
    }
}

/// What the CUDA context, the libraries and their workspace take of a device. Not measured here: about
/// 300 MiB of context and modules on recent devices, 32 MiB of cuBLAS workspace.
pub const CUDA_RUNTIME: u64 = 352 << 20;

/// The plan of `job` done as `setting` says.
///
/// # Errors
/// When the adapter brings more than one prefix.
pub fn plan(job: &Job, setting: Setting) -> Result<Plan> {
    let buffers = Trainer::plan(job.config, job.set, trainer_options(job, setting))?;
    let mut rows = base(job, setting.policy);
    rows.extend(grouped(&buffers, job, setting));
    rows.extend(around(job, setting));
    Ok(Plan { setting, rows })
}

/// Options that sizes depend on; the others are left at rest.
fn trainer_options(job: &Job, setting: Setting) -> TrainerOptions {
    TrainerOptions {
        rows: setting.micro_batch,
        seq_len: job.seq_len,
        policy: setting.policy,
        optimizer: setting.optimizer,
        adamw: AdamWOptions::default(),
        clip: 0.0,
        label_smoothing: 0.0,
        seed: 0,
    }
}

/// Which bytes are in memory, by moment: nothing while loading, then `bytes`.
fn from_the_first_pass(bytes: u64) -> [u64; MOMENTS] {
    by_moment(|moment| if moment == Moment::Loading { 0 } else { bytes })
}

pub(super) fn by_moment(bytes: impl Fn(Moment) -> u64) -> [u64; MOMENTS] {
    Moment::ALL.map(bytes)
}

const POSITIONS: &str = "position embedding";

fn base(job: &Job, policy: Policy) -> Vec<Row> {
    let config = job.config;
    let parts = match job.target {
        Target::Cpu { .. } => BaseBytes::of(config, job.base_dtype),
        Target::Cuda => BaseBytes::on_device(config),
    };
    let (c, f, layers) = (config.width, config.inner, config.layers);
    let tensors: [(&str, Vec<usize>, usize); 7] = [
        ("token embedding", vec![config.vocab, c], 1),
        (POSITIONS, vec![config.positions, c], 1),
        ("c_attn", vec![c, 3 * c], layers),
        ("attn.c_proj", vec![c, c], layers),
        ("c_fc", vec![c, f], layers),
        ("mlp.c_proj", vec![f, c], layers),
        ("head", vec![config.vocab, c], usize::from(!config.tied)),
    ];
    let streamed = policy.stream;
    let (home, lifetime) = match (streamed, job.target) {
        (true, _) => (Home::Disk, "run"),
        (false, Target::Cpu { .. }) => (Home::Host, "run"),
        (false, Target::Cuda) => (Home::Device, "run"),
    };
    let held = |bytes: u64| if streamed { [0; MOMENTS] } else { from_the_first_pass(bytes) };
    let mut rows: Vec<Row> = tensors
        .into_iter()
        .filter(|(_, _, count)| *count > 0)
        .map(|(name, shape, count)| {
            // Positions are no matrix of a product.
            let dtype = if name == POSITIONS { BaseDType::F16 } else { job.base_dtype };
            let bytes = dtype.matrix_bytes(shape[0], shape[1]) * count as u64;
            let dtype = if dtype == BaseDType::Q8 { DType::I8 } else { DType::F16 };
            let (name, dtype) = (name.to_owned(), Some(dtype));
            Row { role: "base", name, dtype, shape, count, bytes, home, lifetime, resident: held(bytes) }
        })
        .collect();
    let small = parts.total() - rows.iter().map(|row| row.bytes).sum::<u64>();
    rows.push(Row { resident: held(small), ..plain("base", "biases and norms", small, home, lifetime) });
    if streamed {
        rows.extend(in_use(parts, job.target));
    }
    rows
}

/// What of a streamed base is in memory.
fn in_use(parts: BaseBytes, target: Target) -> Vec<Row> {
    if target != Target::Cuda {
        let resident = parts.streamed();
        let most = resident.iter().copied().max().unwrap_or(0);
        return vec![Row {
            resident,
            ..plain("base", "in use and read ahead", most, Home::Host, "two stages")
        }];
    }
    let (ends, blocks) = (parts.total() - parts.blocks, 2 * parts.block);
    let on_device = |role, name, bytes, lifetime| Row {
        resident: from_the_first_pass(bytes),
        ..plain(role, name, bytes, Home::Device, lifetime)
    };
    vec![
        on_device("base", "embeddings, head, last norm", ends, "run"),
        on_device("stages", "two blocks in turn", blocks, "two stages"),
        // Of the host, whose memory a device's plan lists and does not count.
        plain("stages", "pinned copies of two blocks", blocks, Home::Host, "two stages"),
    ]
}

/// Memory without elements, in no moment.
fn plain(role: &'static str, name: &str, bytes: u64, home: Home, lifetime: &'static str) -> Row {
    Row {
        role,
        name: name.to_owned(),
        dtype: None,
        shape: Vec::new(),
        count: 1,
        bytes,
        home,
        lifetime,
        resident: [0; MOMENTS],
    }
}

/// The buffers of the arenas, those that are alike in one line.
fn grouped(buffers: &[TableRow], job: &Job, setting: Setting) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for buffer in buffers.iter().filter(|buffer| buffer.bytes() > 0) {
        let name = without_numbers(&buffer.name);
        let home = match (buffer.place, job.target) {
            (Place::Disk, _) => Home::Disk,
            (Place::Memory, Target::Cuda) => Home::Device,
            (Place::Host, _) | (Place::Memory, Target::Cpu { .. }) => Home::Host,
        };
        let row = match rows.iter_mut().find(|row| row.is_like(buffer, &name, home)) {
            Some(row) => row,
            None => {
                rows.push(Row {
                    dtype: Some(buffer.dtype),
                    shape: buffer.shape.clone(),
                    count: 0,
                    ..plain(buffer.role, &name, 0, home, lifetime(buffer.role, &buffer.name))
                });
                let last = rows.len() - 1;
                &mut rows[last]
            }
        };
        row.count += 1;
        row.bytes += buffer.bytes() as u64;
    }
    for row in &mut rows {
        row.resident = match (row.home, row.role) {
            (Home::Disk, "moments") => {
                let window = setting.optimizer.window_bytes().min(row.bytes);
                by_moment(|moment| if moment == Moment::Update { window } else { 0 })
            }
            (Home::Disk, _) => {
                // The input of a block, its output, and one that is being fetched or given back.
                let one = row.bytes / row.count as u64;
                let most = row.bytes.min(3 * one);
                let pass = [Moment::Forward, Moment::Head, Moment::Backward, Moment::Evaluation];
                by_moment(|moment| if pass.contains(&moment) { most } else { 0 })
            }
            // Of the host, whose memory a device's plan lists and does not count.
            (Home::Host, _) if job.target == Target::Cuda => [0; MOMENTS],
            _ => from_the_first_pass(row.bytes),
        };
    }
    rows
}

impl Row {
    fn is_like(&self, buffer: &TableRow, name: &str, home: Home) -> bool {
        self.role == buffer.role
            && self.name == name
            && self.dtype == Some(buffer.dtype)
            && self.shape == buffer.shape
            && self.home == home
    }
}

/// `block 11 qkv` as `block * qkv`.
fn without_numbers(name: &str) -> String {
    let words = name.split(' ').map(|word| if word.parse::<usize>().is_ok() { "*" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// When a buffer is needed. Its pages stay in memory between, unless it lies in a file.
fn lifetime(role: &str, name: &str) -> &'static str {
    match (role, name) {
        ("trainables" | "moments", "gradient" | "d prefix") => "step",
        ("trainables" | "moments", _) => "run",
        ("prefix", _) => "step",
        ("saved inputs" | "saved activations", name) if name.starts_with("shared") => "block",
        ("saved inputs" | "offloaded inputs" | "saved activations", _) => "forward to backward",
        ("workspace", "gathered" | "losses" | "stats_f") => "head",
        ("workspace", name) if name.ends_with("logits") => "block, head",
        ("workspace", _) => "block",
        _ => "micro-batch",
    }
}

/// What is no buffer of an arena: the process itself, rows on their way, scratch of the kernels.
fn around(job: &Job, setting: Setting) -> Vec<Row> {
    let always = |bytes: u64| by_moment(|_| bytes);
    let cells = (job.batch * job.seq_len) as u64;
    let micro = (setting.micro_batch * job.seq_len) as u64;
    // Ids, targets, positions and starts of a batch, the tokenised rows they come from, and lists of a
    // micro-batch that are made on its way to the device.
    let step = cells * (16 + 12) + micro * 16;
    // Strings and lists whose sizes nobody plans: names of tensors and headers of files while saving, losses of
    // a micro-batch, events. Seen: up to 0.1 MiB.
    let small = (256 << 10) + 512 * job.set.layout.tensors.len() as u64;
    let home = Home::Host;
    let mut rows = vec![
        Row {
            resident: always(job.program),
            ..plain("program", "code, runtime, tokenizer", job.program, home, "run")
        },
        Row {
            resident: always(job.rows_on_heap),
            ..plain("data", "tokenised rows", job.rows_on_heap, home, "run")
        },
        Row { resident: from_the_first_pass(step), ..plain("data", "rows of a step", step, home, "step") },
        Row {
            resident: from_the_first_pass(small),
            ..plain("data", "lists, names, events", small, home, "run")
        },
        Row {
            resident: by_moment(|moment| if moment == Moment::Saving { BUFFER as u64 } else { 0 }),
            ..plain("data", "buffer of a file being written", BUFFER as u64, home, "save")
        },
    ];
    match job.target {
        Target::Cpu { threads, arithmetic } => {
            let needs = trainer_options(job, setting).needs(job.config, job.set);
            let bytes = scratch::bytes(needs, threads, arithmetic) as u64;
            rows.push(Row {
                resident: from_the_first_pass(bytes),
                ..plain("scratch", "tiles and packing of all threads", bytes, home, "op")
            });
        }
        Target::Cuda => {
            // On a device's plan the host's memory is listed and not counted.
            rows.iter_mut().for_each(|row| row.resident = [0; MOMENTS]);
            rows.push(Row {
                resident: always(CUDA_RUNTIME),
                ..plain("program", "CUDA context, libraries", CUDA_RUNTIME, Home::Device, "run")
            });
            let bytes = trainer_options(job, setting).device_scratch(job.config, job.set) as u64;
            rows.push(Row {
                resident: from_the_first_pass(bytes),
                ..plain("scratch", "what kernels share", bytes, Home::Device, "op")
            });
        }
    }
    rows.retain(|row| row.bytes > 0);
    rows
}
