//! A base: the frozen model with its name, from a folder or from the program itself.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

use engraft_adapters::{BaseDescription, BaseWeights, NormWeights};

use super::{
    config::Config,
    weights,
    weights::{BaseDType, OnBytes, SourceTensors, Weights},
};
use crate::{
    device::{DType, Device, DeviceKind},
    embedded,
    error::{Error, Result},
    kernels::{column_norms, matmul::Arithmetic},
};

/// Where a base is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseSource {
    /// Compiled into the program.
    Embedded,
    /// A folder with `config.json`, weights and perhaps tokenizer files.
    Folder(PathBuf),
}

/// Where the tokenizer of a base is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerFiles {
    /// Perhaps `tokenizer.json`, or `vocab.json` and `merges.txt`, in this folder.
    Folder(PathBuf),
    /// The text of a `tokenizer.json`.
    Bytes(&'static [u8]),
}

/// A frozen model, ready to run.
#[derive(Debug, Clone)]
pub struct Base {
    /// The name that the user gave.
    pub name: String,
    /// Its sizes and switches.
    pub config: Config,
    /// Its frozen tensors, on the device.
    pub weights: Weights,
    /// Where it came from.
    pub source: BaseSource,
    /// The device that computes with it.
    pub device: Device,
    /// Type of its activations: F32 on CPUs.
    pub activations: DType,
    /// Type that its matrices are kept in.
    pub dtype: BaseDType,
    streamed: bool,
}

impl Base {
    /// Loads a base in FP16; `cache` is the folder for copies and fingerprints.
    ///
    /// # Errors
    /// As [`Config::from_json`] and [`Weights::from_folder`].
    pub fn load(source: &BaseSource, name: &str, cache: &Path) -> Result<Self> {
        Self::load_as(source, name, cache, BaseDType::F16)
    }

    /// Loads a base whose matrices are kept as `dtype`.
    ///
    /// # Errors
    /// As [`Base::load`].
    pub fn load_as(source: &BaseSource, name: &str, cache: &Path, dtype: BaseDType) -> Result<Self> {
        Self::load_with(source, name, cache, dtype, &|_, _| {})
    }

    /// As [`Base::load_as`]. While a base that is not in the cache yet is read and converted, `on_bytes` hears how many
    /// bytes are done, and of how many.
    ///
    /// # Errors
    /// As [`Base::load`].
    pub fn load_with(
        source: &BaseSource,
        name: &str,
        cache: &Path,
        dtype: BaseDType,
        on_bytes: OnBytes,
    ) -> Result<Self> {
        let (config, weights) = match source {
            BaseSource::Embedded => {
                let config = Config::from_json(embedded::CONFIG, Path::new("the embedded config.json"))?;
                let weights = Weights::from_embedded(embedded::model(), &config, dtype)?;
                (config, weights)
            }
            BaseSource::Folder(folder) => {
                let config = weights::read_config(folder)?;
                let weights = Weights::from_folder(folder, &config, cache, dtype, on_bytes)?;
                (config, weights)
            }
        };
        let (device, activations) = (Device::HOST, Device::HOST.kind().default_activations);
        Ok(Self {
            name: name.to_owned(),
            config,
            weights,
            source: source.clone(),
            device,
            activations,
            dtype,
            streamed: false,
        })
    }

    /// The same base on `device`, computing in `activations`. On a CPU BF16 is the arithmetic of attention and of the products
    /// with frozen matrices ([`Arithmetic::Bf16`]); activations stay FP32.
    ///
    /// # Errors
    /// [`Error::Input`] for activations that the device does not compute in, and as [`Weights::bring`].
    pub fn on(mut self, device: Device, activations: DType) -> Result<Self> {
        check_activations(device.kind(), activations)?;
        let stored = device.kind().stored_activations(activations);
        if stored != activations {
            self.weights.multiply(Arithmetic::Bf16);
        }
        if !device.kind().shares_host_memory() {
            self.fit_to(device, activations);
            self.weights.bring(device, true)?;
        }
        Ok(Self { device, activations: stored, ..self })
    }

    /// The same base computing on `device`, with all weights there but those of the blocks, which are brought one
    /// after another when a pass needs them; as [`Base::on`] for a host, where passes bring their pages and give them back.
    ///
    /// # Errors
    /// As [`Base::on`].
    pub fn streamed_on(mut self, device: Device, activations: DType) -> Result<Self> {
        self.streamed = true;
        if device.kind().shares_host_memory() {
            return self.on(device, activations);
        }
        check_activations(device.kind(), activations)?;
        self.fit_to(device, activations);
        self.weights.bring(device, false)?;
        Ok(Self { device, activations, ..self })
    }

    /// A device's products read factors of one type, and whole tiles of the head: while they are copied there, matrices
    /// are rounded, and rows follow the head and the matrices behind a layer norm.
    fn fit_to(&mut self, device: Device, activations: DType) {
        if activations == DType::BF16 {
            self.weights.round_matrices_on_device();
        }
        if let Some(memory) = device.own_memory() {
            self.weights.pad_head_on_device(memory.head_rows);
            self.weights.pad_normed_on_device(memory.delta_rows);
        }
    }

    /// Copies block weights into the fastest layout for generation, and for many samples the head, if it pays for itself:
    /// with `rows` samples of `tokens` tokens side by side. Copying takes about the time of two tokens of 8 samples.
    /// Results are the same to the last bit.
    pub fn for_generation(self: &Arc<Self>, rows: usize, tokens: usize) -> Arc<Self> {
        // Half the bytes, or fewer.
        let worth = if self.dtype == BaseDType::F16 { WORTH_SETTLING } else { WORTH_SETTLING / 2 };
        if rows.saturating_mul(tokens) < worth || !self.device.kind().wants_settled_weights || self.streamed {
            return Arc::clone(self);
        }
        let mut settled = Self::clone(self);
        // Without the memory for it the file serves as well.
        if settled.weights.settle_blocks(Some(rows)).is_err() {
            return Arc::clone(self);
        }
        if MANY.contains(&rows) {
            let _ = settled.weights.transpose_head();
        }
        Arc::new(settled)
    }

    /// The same base, whose blocks every pass brings when it needs them. On a device of its own memory a base is brought
    /// there in one way or the other, and stays as it is.
    pub fn streamed(self: &Arc<Self>) -> Arc<Self> {
        if self.streamed || !self.device.kind().shares_host_memory() {
            return Arc::clone(self);
        }
        Arc::new(Self { streamed: true, ..Self::clone(self) })
    }

    /// Whether every pass brings blocks when it needs them.
    pub fn is_streamed(&self) -> bool {
        self.streamed
    }

    /// The names and sizes that adapters need of this base.
    pub fn description(&self) -> BaseDescription {
        let mut description = self.config.describe(&self.name, Some(&self.weights.fingerprint));
        description.revision = self.revision();
        description
    }

    /// The commit, for a base in the hub's cache (`snapshots/<commit>`).
    pub fn revision(&self) -> Option<String> {
        let BaseSource::Folder(folder) = &self.source else { return None };
        let parent = folder.parent()?.file_name()?;
        let commit = folder.file_name()?.to_str()?;
        let is_commit = commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
        (parent == "snapshots" && is_commit).then(|| commit.to_owned())
    }

    /// Its tensors as its files have them, which may be of more precision than what is computed with.
    ///
    /// # Errors
    /// As [`SourceTensors::from_folder`].
    pub fn source_tensors(&self) -> Result<SourceTensors> {
        match &self.source {
            BaseSource::Embedded => SourceTensors::from_embedded(embedded::model(), &self.config),
            BaseSource::Folder(folder) => SourceTensors::from_folder(folder, &self.config),
        }
    }

    /// The text of its `config.json`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn config_text(&self) -> Result<String> {
        match &self.source {
            BaseSource::Embedded => Ok(embedded::CONFIG.to_owned()),
            BaseSource::Folder(folder) => weights::config_text(folder),
        }
    }

    /// Where the tokenizer is stored, if the base has one.
    pub fn tokenizer_files(&self) -> TokenizerFiles {
        match &self.source {
            BaseSource::Embedded => TokenizerFiles::Bytes(embedded::TOKENIZER),
            BaseSource::Folder(folder) => TokenizerFiles::Folder(folder.clone()),
        }
    }
}

/// Samples times tokens from which on generation is faster with settled blocks. They save an eighth to a fifth of the time of
/// 4 to 32 samples; of one a quarter on a Zen 4, whose rows of weights are in as many small pages of the file, and nothing on
/// a fifth-generation Xeon, where copying them takes as long as five tokens.
const WORTH_SETTLING: usize = 96;

/// Samples whose logits the transpose of the head in strips makes faster: fewer read its rows as they are, of more the
/// panels are as fast.
pub(super) const MANY: RangeInclusive<usize> = 25..=48;

/// Refuses activations that a kind of device does not compute in.
///
/// # Errors
/// [`Error::Input`] with the types that it computes in, and the devices that compute in `activations`.
pub(crate) fn check_activations(kind: &DeviceKind, activations: DType) -> Result<()> {
    if kind.computes_in(activations) {
        return Ok(());
    }
    let types: Vec<_> = kind.activations().iter().map(|dtype| dtype.name()).collect();
    let others = DeviceKind::ALL.iter().filter(|other| other.computes_in(activations));
    let others: String = others.map(|other| format!(", or --device {}", other.name)).collect();
    Err(Error::input(format!(
        "--precision {}: {} does not compute in it; give --precision {}{others}",
        activations.name(),
        kind.label,
        types.join(" or ")
    )))
}

impl BaseWeights for Base {
    fn matrix(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        let block = self.weights.blocks.get(layer)?;
        block.linears().get(site).map(|linear| linear.weight.view().to_floats())
    }

    /// As training computes them on a CPU, so that a scale m / n begins as exactly 1 there.
    fn column_norms(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        let block = self.weights.blocks.get(layer)?;
        block.linears().get(site).map(|linear| column_norms::of_weight(linear.weight.view()))
    }

    fn bias(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        let block = self.weights.blocks.get(layer)?;
        block.linears().get(site).map(|linear| linear.bias.view().to_floats())
    }

    fn norm(&self, layer: Option<usize>, norm: usize) -> Option<NormWeights> {
        let norms = match layer {
            Some(layer) => {
                let block = self.weights.blocks.get(layer)?;
                vec![&block.ln_1, &block.ln_2]
            }
            None => vec![&self.weights.ln_f],
        };
        let norm = norms.get(norm)?;
        Some(NormWeights { gain: norm.gain.view().to_floats(), bias: norm.bias.view().to_floats() })
    }

    fn token_embeddings(&self, ids: &[u32]) -> Option<Vec<f32>> {
        let known = ids.iter().all(|&id| (id as usize) < self.config.vocab);
        let rows = ids.iter().map(|&id| self.weights.wte.view().row(id as usize).to_floats());
        known.then(|| rows.flatten().collect())
    }
}
