//! The trainings of the checks and their sizes: a tiny base on the driver of `cuda-shim/driver`, whose device
//! computes at the speed of an interpreter, the embedded base on a real device.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use engraft::{
    data::{Batch, NO_LOSS, Row},
    device::{
        DType, Device,
        arena::{Arenas, TableRow},
    },
    engine::{Trainer, TrainerOptions},
    error::{Error, Result},
    model::{Base, BaseDType, BaseSource, Policy},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::{
    AdaLoraSpec, AdapterSet, AdapterSpec, DoraSpec, Ia3Spec, LnTuningSpec, LoraSpec, PrefixSpec,
    PromptTuningSpec, Targets, VeraSpec,
};
use engraft_util::rng;

use crate::wide;

/// The base of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Model {
    /// 6 layers of width 128 in heads of 32.
    Embedded,
    /// 3 layers of width 24 in heads of 8, of tests/golden.
    Tiny,
    /// 2 layers of width 128 in heads of 64.
    Wide,
}

/// The size of the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    model: Model,
    /// Type that the matrices of the base are kept in.
    pub kept: BaseDType,
    /// Rows of an optimizer step.
    pub rows: usize,
    /// Tokens t of a row.
    pub tokens: usize,
    /// Optimizer steps of a training.
    pub steps: usize,
}

impl Size {
    /// Seconds on a real device.
    pub const LARGE: Self =
        Self { model: Model::Embedded, kept: BaseDType::F16, rows: 6, tokens: 37, steps: 12 };
    /// Minutes where kernels are interpreted.
    pub const SMALL: Self = Self { model: Model::Tiny, kept: BaseDType::F16, rows: 2, tokens: 9, steps: 3 };

    /// Whether this is [`Size::LARGE`].
    pub fn is_large(self) -> bool {
        self.kept_as(BaseDType::F16) == Self::LARGE
    }

    /// The same with the matrices of the base kept as `kept`.
    pub fn kept_as(self, kept: BaseDType) -> Self {
        Self { kept, ..self }
    }

    /// The same for heads of 64, after a prefix longer than a tile of keys where it is large.
    pub fn with_wide_heads(self) -> Self {
        let (tokens, steps) = if self.is_large() { (150, self.steps) } else { (self.tokens, 2) };
        Self { model: Model::Wide, tokens, steps, ..self }
    }

    fn source(self) -> Result<(BaseSource, &'static str)> {
        Ok(match self.model {
            Model::Embedded => (BaseSource::Embedded, "embedded"),
            Model::Tiny => (BaseSource::Folder(golden("bases/tiny")?), "tiny"),
            Model::Wide => {
                let folder = cache().join("wide");
                if !folder.exists() {
                    wide::write(&folder)?;
                }
                (BaseSource::Folder(folder), "wide")
            }
        })
    }
}

static GOLDEN: OnceLock<PathBuf> = OnceLock::new();

/// Has golden files looked for in `folder`.
pub fn golden_is_in(folder: PathBuf) {
    let _ = GOLDEN.set(folder);
}

/// A file or folder among the golden files: of the folder that was named, of the working folder, or of the sources that
/// this program was built from, which need not be on this machine.
///
/// # Errors
/// When none of these has it.
pub fn golden(path: &str) -> Result<PathBuf> {
    let here = Path::new("tests/golden");
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join(here);
    let folder = match GOLDEN.get() {
        Some(named) => named.as_path(),
        None if here.exists() => here,
        None => &built,
    };
    let found = folder.join(path);
    match found.exists() {
        true => Ok(found),
        false => Err(Error::input(format!(
            "{}: there is no such golden file; name the folder tests/golden of the sources with --golden",
            found.display()
        ))),
    }
}

/// Bytes of a device's memory that this process holds now.
pub fn held(device: Device) -> usize {
    if let Device::Cuda(gpu) = device { gpu.held().0 } else { 0 }
}

/// Bytes of the scratch of kernels among them.
pub fn scratch(device: Device) -> usize {
    if let Device::Cuda(gpu) = device { gpu.scratch_held() } else { 0 }
}

/// The base of this size, whose blocks come to `device` when they are needed.
pub fn streamed(size: Size, device: Device, activations: DType) -> Result<Arc<Base>> {
    let (source, name) = size.source()?;
    let base = Base::load_as(&source, name, &cache(), size.kept)?;
    Ok(Arc::new(base.streamed_on(device, activations)?))
}

fn cache() -> PathBuf {
    std::env::temp_dir().join(format!("device-check-{}", std::process::id()))
}

/// Removes the files that loading bases left.
pub fn clean() {
    let _ = std::fs::remove_dir_all(cache());
}

/// The base of this size on `device`.
pub fn base(size: Size, device: Device, activations: DType) -> Result<Arc<Base>> {
    let (source, name) = size.source()?;
    Ok(Arc::new(Base::load_as(&source, name, &cache(), size.kept)?.on(device, activations)?))
}

/// A base copied to `device`.
pub fn load(source: &BaseSource, name: &str, device: Device, activations: DType) -> Result<Arc<Base>> {
    Ok(Arc::new(Base::load(source, name, &cache())?.on(device, activations)?))
}

/// Virtual tokens of a prompt.
const PROMPT: usize = 2;

/// The adapters of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// LoRA on every linear site.
    Lora,
    /// A prefix whose tensor is large enough for 8-bit moments.
    Prefix,
    /// A prefix with a projection.
    Projected,
    /// LoRA on every linear site and a prefix with a projection.
    Both,
    /// DoRA on every linear site.
    Dora,
    /// VeRA on every linear site, whose factors are frozen and shared.
    Vera,
    /// AdaLoRA on every linear site, which loses ranks after its second to fourth step.
    AdaLora,
    /// IA3 on every linear site: inputs of the feed-forward modules, outputs of the others.
    Ia3,
    /// Every layer norm.
    Norms,
    /// A prompt of virtual tokens.
    Prompt,
    /// VeRA, IA3, layer norms and a prompt in one training.
    Several,
}

impl Kind {
    /// Every kind, in the order of the table.
    pub const ALL: [Self; 11] = [
        Self::Lora,
        Self::Prefix,
        Self::Projected,
        Self::Both,
        Self::Dora,
        Self::Vera,
        Self::AdaLora,
        Self::Ia3,
        Self::Norms,
        Self::Prompt,
        Self::Several,
    ];

    /// Name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Prefix => "prefix",
            Self::Projected => "projected prefix",
            Self::Both => "lora and projected prefix",
            Self::Dora => "dora",
            Self::Vera => "vera",
            Self::AdaLora => "adalora",
            Self::Ia3 => "ia3",
            Self::Norms => "ln_tuning",
            Self::Prompt => "prompt_tuning",
            Self::Several => "vera, ia3, norms and prompt",
        }
    }

    fn spec(self, dropout: f64) -> AdapterSpec {
        let targets = || "all-linear".parse::<Targets>().unwrap_or_else(|never| match never {});
        let lora = || LoraSpec { rank: 5, targets: targets(), dropout, ..LoraSpec::default() };
        let projected = || PrefixSpec { length: 7, projection: Some(12) };
        let vera = || VeraSpec { rank: 6, targets: targets(), dropout, ..VeraSpec::default() };
        let adalora = || AdaLoraSpec {
            init_r: 6,
            target_r: 3,
            targets: targets(),
            dropout,
            tfinal: 1,
            total_step: 4,
            ..AdaLoraSpec::default()
        };
        let ia3 = || Ia3Spec { targets: targets(), feedforward: None };
        let prompt = || PromptTuningSpec { length: PROMPT };
        match self {
            Self::Lora => lora().into(),
            Self::Prefix => PrefixSpec { length: 29, projection: None }.into(),
            Self::Projected => projected().into(),
            Self::Both => AdapterSpec { prefix: Some(projected()), ..lora().into() },
            // Its dropout is always 0.
            Self::Dora => DoraSpec { lora: LoraSpec { dropout: 0.0, ..lora() } }.into(),
            Self::Vera => vera().into(),
            Self::AdaLora => adalora().into(),
            Self::Ia3 => ia3().into(),
            Self::Norms => LnTuningSpec::default().into(),
            Self::Prompt => prompt().into(),
            // PEFT has no order for a delta and a vector of inputs at one module.
            Self::Several => AdapterSpec {
                ia3: Some(ia3()),
                ln_tuning: Some(LnTuningSpec::default()),
                prompt_tuning: Some(prompt()),
                ..VeraSpec { targets: Targets::List(vec!["c_attn".into(), "c_fc".into()]), ..vera() }.into()
            },
        }
    }
}

/// One training of the checks.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// The adapters that are trained.
    pub kind: Kind,
    /// The policy: recompute and placements.
    pub policy: Policy,
    /// Number format of the moments.
    pub optimizer: OptimizerKind,
    /// Rows of a micro-batch.
    pub micro_batch: usize,
    /// Dropout in front of every A.
    pub dropout: f64,
    /// The size of the check.
    pub size: Size,
}

impl Recipe {
    /// `kind` with everything kept, dropout, and all rows at a time.
    pub fn of(kind: Kind, size: Size) -> Self {
        let policy = Policy { head_rows: 5, ..Policy::default() };
        Self { kind, policy, optimizer: OptimizerKind::AdamW, micro_batch: size.rows, dropout: 0.1, size }
    }

    /// Options of the trainer on a base that computes in `activations`.
    pub fn options(&self, activations: DType) -> TrainerOptions {
        TrainerOptions {
            rows: self.micro_batch,
            seq_len: self.size.tokens,
            policy: Policy { activations, ..self.policy },
            optimizer: self.optimizer,
            adamw: AdamWOptions::default(),
            clip: 1.0,
            label_smoothing: 0.1,
            neftune: 0.0,
            seed: 1,
        }
    }

    /// The adapter resolved against `base`.
    pub fn set(&self, base: &Base) -> Result<AdapterSet> {
        Ok(AdapterSet::new(&self.kind.spec(self.dropout), &base.description())?)
    }

    /// The rows of a step, cut into micro-batches.
    pub fn batches(&self, base: &Base) -> Vec<Batch> {
        let vocab = base.config.vocab as u32;
        let prompt = if matches!(self.kind, Kind::Prompt | Kind::Several) { PROMPT } else { 0 };
        let virtual_ids = vocab..vocab + prompt as u32;
        let row = |row| tokens(row, self.size.tokens, &virtual_ids);
        let rows: Vec<Row> = (0..self.size.rows as u64).map(row).collect();
        rows.chunks(self.micro_batch).map(|rows| Batch::new(&rows.iter().collect::<Vec<_>>())).collect()
    }

    /// A trainer, prepared on the device of `base`.
    pub fn prepare(&self, base: &Arc<Base>) -> Result<Prepared> {
        let set = self.set(base)?;
        let options = self.options(base.activations);
        let table = Trainer::plan(&base.config, &set, options)?;
        let table = table.iter().filter(|row| !row.place.is_away()).map(TableRow::bytes).sum();
        let scratch = options.device_scratch(&base.config, base.dtype, &set);
        // A device's copy in BF16 has other weights to start from.
        let values = start(&set, self::base(self.size, Device::Cpu, DType::F32)?.as_ref())?;
        let arenas = Arenas::real(Some(std::env::temp_dir())).on(base.device);
        let trainer = Trainer::new(Arc::clone(base), set, &values, options, arenas)?;
        Ok(Prepared { trainer, batches: self.batches(base), table, scratch })
    }

    /// The losses of every step, and the values after the last.
    pub fn run(&self, base: &Arc<Base>) -> Result<Outcome> {
        let mut prepared = self.prepare(base)?;
        prepared.steps(self.size.steps)
    }
}

/// Values to begin with: the initial ones on the weights of `base`, each with a little added, so that no factor is 0 or 1.
pub fn start(set: &AdapterSet, base: &Base) -> Result<Vec<f32>> {
    let mut values = set.init_from(3, Some(base))?;
    let small = |at: u64| 0.1 * (rng::uniform(17, at) - 0.5);
    values.iter_mut().zip(0..).for_each(|(value, at)| *value += small(at));
    Ok(values)
}

/// A trainer with its rows and its plan.
pub struct Prepared {
    /// The trainer on its device.
    pub trainer: Trainer,
    /// The rows of every step.
    pub batches: Vec<Batch>,
    /// Planned bytes of all buffers in the device's memory.
    pub table: usize,
    /// Planned bytes of the scratch of kernels.
    pub scratch: usize,
}

/// The results of a training.
pub struct Outcome {
    /// Mean loss before each update.
    pub losses: Vec<f64>,
    /// All trained values after the last step.
    pub values: Vec<f32>,
}

impl Prepared {
    /// Makes `steps` optimizer steps.
    pub fn steps(&mut self, steps: usize) -> Result<Outcome> {
        let mut losses = Vec::new();
        for _ in 0..steps {
            losses.push(self.trainer.step(&self.batches, 3e-3)?.loss);
        }
        Ok(Outcome { losses, values: self.trainer.values().into_owned() })
    }
}

/// A row of `len` repeatable tokens in two documents, each after virtual tokens of the ids `prompt`; about half of the
/// tokens have a loss.
fn tokens(row: u64, len: usize, prompt: &Range<u32>) -> Row {
    let (key, vocab) = (rng::key(&[row]), u64::from(prompt.start));
    let mut tokens = Row::default();
    for cells in [len / 3, len - len / 3] {
        let first = tokens.ids.len() as u64;
        let ids: Vec<u32> = (first..first + (cells - prompt.len()) as u64)
            .map(|at| (rng::bits(key, at) % vocab) as u32)
            .collect();
        let next = |at: usize| ids.get(at).map_or(NO_LOSS, |&id| id as i32);
        let targets: Vec<i32> =
            (0..ids.len()).map(|at| if at.is_multiple_of(2) { next(at + 1) } else { NO_LOSS }).collect();
        tokens.push(prompt.clone(), next(0), &ids, &targets);
    }
    tokens
}
