//! The frozen weights of a base, FP16 and mapped from their file, and the fingerprint that names them.
//!
//! An FP16 safetensors source is mapped where it lies. Any other source is rewritten once, tensor by
//! tensor, as an FP16 `model.safetensors` in the cache, and that is mapped. Values are checked in the same
//! pass that takes the fingerprint; the cache keeps the result under the identity of the source (path,
//! size and times of its files), so a second load reads headers only.
//!
//! This is the only part of the model that opens a file.

mod cache;
mod convert;
mod halves;
mod names;
mod pickle;
mod source;
mod stored;

use std::{fs::File, path::Path, sync::Arc};

use memmap2::Mmap;

use self::{
    cache::{Entry, Hold},
    names::Wanted,
    source::{Content, Source, SourceFile},
    stored::Stored,
};
use crate::{
    error::{Error, Result},
    kernels::{
        device::{Bytes, DType, Device, Frozen},
        matmul::Arithmetic,
    },
    model::config::Config,
};

pub use self::source::shard_names;

/// Everything of a base that the model reads, FP16; v vocabulary, c width.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Token embedding, (v, c); also the head of a tied model.
    pub wte: Frozen,
    /// Position embedding, (positions, c).
    pub wpe: Frozen,
    /// From the first block to the last.
    pub blocks: Vec<BlockWeights>,
    /// Before the head.
    pub ln_f: Norm,
    /// Head, (v, c); `None` when it is the token embedding.
    pub head: Option<Frozen>,
    /// How a CPU multiplies with the head.
    pub arithmetic: Arithmetic,
    /// Names the values: equal for every copy of the same FP16 weights, whatever their file.
    ///
    /// `engraft1:blake3:` and the BLAKE3 hash over a version line and, for each tensor in canonical order,
    /// its canonical name, a newline, its rank and sizes as 64-bit little-endian numbers, and its FP16
    /// bytes, little-endian. A tied head is not hashed.
    pub fingerprint: String,
}

/// One transformer block; c width.
#[derive(Debug, Clone)]
pub struct BlockWeights {
    /// Before attention.
    pub ln_1: Norm,
    /// Queries, keys and values side by side, (c, 3c).
    pub c_attn: Linear,
    /// After attention, (c, c).
    pub attn_proj: Linear,
    /// Before the MLP.
    pub ln_2: Norm,
    /// Into the MLP, (c, inner).
    pub c_fc: Linear,
    /// Out of the MLP, (inner, c).
    pub mlp_proj: Linear,
}

/// A LayerNorm's parameters.
#[derive(Debug, Clone)]
pub struct Norm {
    /// Factor, (c).
    pub gain: Frozen,
    /// Summand, (c).
    pub bias: Frozen,
}

/// A Conv1D's parameters: `y = x W + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// (inputs, outputs), row-major.
    pub weight: Frozen,
    /// (outputs).
    pub bias: Frozen,
    /// Columns of x.
    pub inputs: usize,
    /// Columns of y.
    pub outputs: usize,
    /// How a CPU multiplies with it.
    pub arithmetic: Arithmetic,
}

impl Weights {
    /// Maps the weights that lie in `folder`, through `cache` when they are not FP16.
    ///
    /// # Errors
    /// [`Error::Input`] when the files are damaged, or hold other tensors than `config` asks for, or values
    /// that FP16 cannot; [`Error::Failed`] when the cache cannot be written.
    pub fn from_folder(folder: &Path, config: &Config, cache: &Path) -> Result<Self> {
        let wanted = names::wanted(config);
        let source = Source::open(folder)?;
        source.check(&wanted, config.tied)?;
        let entry = Entry::of(cache, &source, &wanted)?;
        if source.is_mappable(&wanted) {
            let fingerprint = match entry.fingerprint() {
                Some(fingerprint) => fingerprint,
                None => {
                    let fingerprint = convert::fingerprint(&source, &wanted, config.tied)?;
                    // A cache that cannot be written costs the next load a pass, no more.
                    let _ = entry.keep(&fingerprint);
                    fingerprint
                }
            };
            return Self::map(&source, &wanted, config, fingerprint);
        }
        if let Some(weights) = Self::converted(&entry, &wanted, config) {
            return Ok(weights);
        }
        let _hold = Hold::on(&entry)?;
        // Another process may have converted it while this one waited.
        if let Some(weights) = Self::converted(&entry, &wanted, config) {
            return Ok(weights);
        }
        let fingerprint = entry.write_model(|file| convert::convert(&source, &wanted, config.tied, file))?;
        entry.keep(&fingerprint)?;
        let copy = Source::open_file(entry.model())?;
        Self::map(&copy, &wanted, config, fingerprint)
    }

    /// Weights that are compiled into the program.
    ///
    /// # Errors
    /// [`Error::Input`] when the bytes are no FP16 safetensors file of `config`.
    pub fn from_embedded(bytes: &'static [u8], config: &Config) -> Result<Self> {
        let wanted = names::wanted(config);
        let source = Source::embedded(bytes)?;
        source.check(&wanted, config.tied)?;
        if !source.is_mappable(&wanted) {
            return Err(Error::input("the embedded base is not FP16; build the program with an FP16 base"));
        }
        let fingerprint = convert::fingerprint(&source, &wanted, config.tied)?;
        Self::map(&source, &wanted, config, fingerprint)
    }

    /// Has CPUs multiply with all matrices in this way.
    pub fn multiply(&mut self, arithmetic: Arithmetic) {
        self.arithmetic = arithmetic;
        for block in &mut self.blocks {
            for linear in [&mut block.c_attn, &mut block.attn_proj, &mut block.c_fc, &mut block.mlp_proj] {
                linear.arithmetic = arithmetic;
            }
        }
    }

    /// Brings all tensors to `device`, tensor by tensor; what was mapped of files is let go.
    ///
    /// # Errors
    /// As [`Frozen::bring`].
    pub fn bring(&mut self, device: Device) -> Result<()> {
        let mut tensors = vec![&mut self.wte, &mut self.wpe];
        for block in &mut self.blocks {
            let BlockWeights { ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj } = block;
            for norm in [ln_1, ln_2] {
                tensors.extend([&mut norm.gain, &mut norm.bias]);
            }
            for linear in [c_attn, attn_proj, c_fc, mlp_proj] {
                tensors.extend([&mut linear.weight, &mut linear.bias]);
            }
        }
        tensors.extend([&mut self.ln_f.gain, &mut self.ln_f.bias]);
        tensors.extend(&mut self.head);
        Frozen::bring(&mut tensors, device)
    }

    /// The finished copy in the cache, if there is one.
    fn converted(entry: &Entry, wanted: &[Wanted], config: &Config) -> Option<Self> {
        let fingerprint = entry.fingerprint()?;
        let copy = Source::open_file(entry.model()).ok()?;
        copy.check(wanted, config.tied).ok()?;
        copy.is_mappable(wanted).then(|| Self::map(&copy, wanted, config, fingerprint).ok())?
    }

    /// Views of the wanted tensors, which were checked before.
    fn map(source: &Source, wanted: &[Wanted], config: &Config, fingerprint: String) -> Result<Self> {
        let bytes = source.files.iter().map(map_file).collect::<Result<Vec<_>>>()?;
        let mut views = Vec::with_capacity(wanted.len());
        for tensor in wanted {
            let stored: Option<&Stored> = source.tensors.get(&tensor.name);
            let stored = stored.ok_or_else(|| Error::input(format!("{} is missing", tensor.name)))?;
            let view = Frozen::new(bytes[stored.file].clone(), stored.start, DType::F16, tensor.len())?;
            views.push(view);
        }
        assemble(views, config, fingerprint)
            .ok_or_else(|| Error::input("the weights hold fewer tensors than their config.json asks for"))
    }
}

/// Reads `config.json` in `folder`.
///
/// # Errors
/// When there is none, and as [`Config::from_json`].
pub fn read_config(folder: &Path) -> Result<Config> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|cause| Error::reading(&path, &cause))?;
    Config::from_json(&text, &path)
}

/// Hands the views out in canonical order.
fn assemble(views: Vec<Frozen>, config: &Config, fingerprint: String) -> Option<Weights> {
    let mut next = views.into_iter();
    let wte = next.next()?;
    let wpe = next.next()?;
    let blocks = (0..config.layers).map(|_| block(&mut next, config)).collect::<Option<Vec<_>>>()?;
    let ln_f = norm(&mut next)?;
    let head = next.next();
    Some(Weights { wte, wpe, blocks, ln_f, head, arithmetic: Arithmetic::F32, fingerprint })
}

fn block(next: &mut dyn Iterator<Item = Frozen>, config: &Config) -> Option<BlockWeights> {
    let c = config.width;
    Some(BlockWeights {
        ln_1: norm(next)?,
        c_attn: linear(next, c, 3 * c)?,
        attn_proj: linear(next, c, c)?,
        ln_2: norm(next)?,
        c_fc: linear(next, c, config.inner)?,
        mlp_proj: linear(next, config.inner, c)?,
    })
}

fn norm(next: &mut dyn Iterator<Item = Frozen>) -> Option<Norm> {
    Some(Norm { gain: next.next()?, bias: next.next()? })
}

fn linear(next: &mut dyn Iterator<Item = Frozen>, inputs: usize, outputs: usize) -> Option<Linear> {
    let (weight, bias) = (next.next()?, next.next()?);
    Some(Linear { weight, bias, inputs, outputs, arithmetic: Arithmetic::F32 })
}

fn map_file(file: &SourceFile) -> Result<Arc<dyn Bytes>> {
    if let Content::Embedded(bytes) = file.content {
        return Ok(Arc::new(bytes));
    }
    let opened = File::open(&file.path).map_err(|cause| Error::reading(&file.path, &cause))?;
    // SAFETY: the mapping is read-only and its elements are plain numbers, so every content is valid.
    // That nobody truncates or rewrites the file during a run is asked of the user, as by every program
    // that maps weights; files of the cache are only ever replaced by rename.
    let map = unsafe { Mmap::map(&opened) }.map_err(|cause| Error::reading(&file.path, &cause))?;
    Ok(Arc::new(map))
}
