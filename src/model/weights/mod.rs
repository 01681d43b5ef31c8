//! The frozen weights of a base, mapped from their file in FP16, 8 or 4 bits, and the fingerprint that names them.
//!
//! An FP16 safetensors source is mapped in place. Any other source, and any that is wanted in codes, is
//! rewritten once, tensor by tensor, as a safetensors file in the cache, and that is mapped. Values are checked in the same
//! pass that takes the fingerprint; the cache keeps the result under the identity of the source (path,
//! size and times of its files), so a second load reads headers only.
//!
//! This is the only part of the model that opens a file.

mod base_dtype;
mod cache;
mod convert;
mod f16_convert;
mod names;
mod pickle;
mod source;
mod source_tensors;
mod stored;

use std::{fs::File, io::Cursor, path::Path, sync::Arc};

use memmap2::Mmap;

use self::{
    base_dtype::{nested_of, scales_of},
    cache::{Entry, Hold},
    convert::{Conversion, Sink},
    names::Wanted,
    source::{Content, Source, SourceFile},
    stored::StoredTensor,
};
use super::{arch::SITES, config::Config};
use crate::{
    device::{Bytes, DType, Device, Frozen},
    error::{Error, Result},
    kernels::matmul::{Arithmetic, FrozenMatrix, Layout, Scales, TransposedMatrix},
};

pub use self::{base_dtype::BaseDType, convert::OnBytes, source_tensors::SourceTensors};

/// Everything of a base that the model reads; v vocabulary, c width. Vectors and positions are FP16.
#[derive(Debug, Clone)]
pub struct Weights {
    /// Token embedding, (v, c); also the head of a tied model.
    pub wte: FrozenMatrix,
    /// Position embedding, (positions, c).
    pub wpe: Frozen,
    /// From the first block to the last.
    pub blocks: Vec<BlockWeights>,
    /// The layer norm before the head.
    pub ln_f: Norm,
    /// Head, (v, c); `None` when it is the token embedding.
    pub head: Option<FrozenMatrix>,
    /// Transpose of the head for the logits of many rows, (c, v), where a CPU that generates has it.
    pub head_transposed: Option<TransposedMatrix>,
    /// Names the values: equal for every copy of the same FP16 weights, whatever their file, and whether or not they
    /// were rounded to codes afterwards.
    ///
    /// `engraft1:blake3:` and the BLAKE3 hash over a version line and, for each tensor in canonical order,
    /// its canonical name, a newline, its rank and sizes as 64-bit little-endian numbers, and its FP16
    /// bytes, little-endian. A tied head is not hashed.
    pub fingerprint: String,
}

/// One transformer block; c width.
#[derive(Debug, Clone)]
pub struct BlockWeights {
    /// The layer norm before attention.
    pub ln_1: Norm,
    /// Queries, keys and values side by side, (c, 3c).
    pub c_attn: Linear,
    /// After attention, (c, c).
    pub attn_proj: Linear,
    /// The layer norm before the MLP.
    pub ln_2: Norm,
    /// Into the MLP, (c, inner).
    pub c_fc: Linear,
    /// Out of the MLP, (inner, c).
    pub mlp_proj: Linear,
}

impl BlockWeights {
    /// Its linear layers, in the order of [`Site`](crate::model::arch::Site).
    pub fn linears(&self) -> [&Linear; SITES] {
        [&self.c_attn, &self.attn_proj, &self.c_fc, &self.mlp_proj]
    }

    /// Its tensors, in the order of a pass.
    pub fn tensors(&self) -> Vec<&Frozen> {
        let Self { ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj } = self;
        let mut tensors = Vec::new();
        for (norms, linears) in [(ln_1, [c_attn, attn_proj]), (ln_2, [c_fc, mlp_proj])] {
            tensors.extend([&norms.gain, &norms.bias]);
            for linear in linears {
                tensors.extend(linear.weight.tensors().chain([&linear.bias]));
            }
        }
        tensors
    }

    /// As [`BlockWeights::tensors`], to be replaced.
    pub fn tensors_mut(&mut self) -> Vec<&mut Frozen> {
        let Self { ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj } = self;
        let mut tensors = Vec::new();
        for (norms, linears) in [(ln_1, [c_attn, attn_proj]), (ln_2, [c_fc, mlp_proj])] {
            tensors.extend([&mut norms.gain, &mut norms.bias]);
            for linear in linears {
                tensors.extend(linear.weight.tensors_mut().chain([&mut linear.bias]));
            }
        }
        tensors
    }
}

/// The parameters of a layer norm, FP16.
#[derive(Debug, Clone)]
pub struct Norm {
    /// Factor of each feature, (c).
    pub gain: Frozen,
    /// Summand of each feature, (c).
    pub bias: Frozen,
}

/// A Conv1D's parameters: `y = x W + b`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// (inputs, outputs): columns of x, columns of y.
    pub weight: FrozenMatrix,
    /// Added to y, (outputs).
    pub bias: Frozen,
}

impl Weights {
    /// Maps the weights in `folder` as `dtype`, through `cache` when they are kept in another type. Of a pass over all
    /// values, which a base that is not in the cache needs, `on_bytes` hears how far it is.
    ///
    /// # Errors
    /// [`Error::Input`] when the files are damaged, or hold other tensors than `config` asks for, or values
    /// that FP16 cannot; [`Error::Failed`] when the cache cannot be written.
    pub fn from_folder(
        folder: &Path,
        config: &Config,
        cache: &Path,
        dtype: BaseDType,
        on_bytes: OnBytes,
    ) -> Result<Self> {
        let wanted = names::wanted(config);
        let source = Source::open(folder)?;
        source.check(&wanted, config.tied)?;
        let entry = Entry::of(cache, &source, &wanted, dtype)?;
        if dtype == BaseDType::F16 && source.is_mappable(&wanted) {
            let fingerprint = match entry.fingerprint() {
                Some(fingerprint) => fingerprint,
                None => {
                    let fingerprint = convert::fingerprint(&source, &wanted, config.tied, on_bytes)?;
                    // A cache that cannot be written now costs the next load a pass, no more.
                    if let Some(_hold) = Hold::at_once(&entry) {
                        let _ = entry.keep(&fingerprint);
                    }
                    fingerprint
                }
            };
            return Self::map(&source, &wanted, config, fingerprint);
        }
        if let Some(weights) = Self::converted(&entry, &wanted, config, dtype) {
            return Ok(weights);
        }
        let _hold = Hold::on(&entry)?;
        // Another process may have converted it while this one waited.
        if let Some(weights) = Self::converted(&entry, &wanted, config, dtype) {
            return Ok(weights);
        }
        let conversion = Conversion { source: &source, wanted: &wanted, tied: config.tied, on_bytes };
        let fingerprint = entry.write_model(|file| convert::convert(conversion, dtype, file))?;
        entry.keep(&fingerprint)?;
        let copy = Source::open_file(entry.model())?;
        Self::map(&copy, &wanted, config, fingerprint)
    }

    /// Weights that are compiled into the program; those of another type than FP16 are made of them in memory.
    ///
    /// # Errors
    /// [`Error::Input`] when the bytes are no FP16 safetensors file of `config`.
    pub fn from_embedded(bytes: &'static [u8], config: &Config, dtype: BaseDType) -> Result<Self> {
        let wanted = names::wanted(config);
        let source = Source::embedded(bytes)?;
        source.check(&wanted, config.tied)?;
        if !source.is_mappable(&wanted) {
            return Err(Error::input("the embedded base is not FP16; build the program with an FP16 base"));
        }
        if dtype == BaseDType::F16 {
            let fingerprint = convert::fingerprint(&source, &wanted, config.tied, &|_, _| {})?;
            return Self::map(&source, &wanted, config, fingerprint);
        }
        let mut copy = Cursor::new(Vec::new());
        let mut file = Sink { file: &mut copy, path: Path::new("the embedded base"), at: 0 };
        let conversion =
            Conversion { source: &source, wanted: &wanted, tied: config.tied, on_bytes: &|_, _| {} };
        let fingerprint = convert::convert(conversion, dtype, &mut file)?;
        Self::map(&Source::in_memory(copy.into_inner())?, &wanted, config, fingerprint)
    }

    /// Has CPUs multiply with all matrices in this way.
    pub fn multiply(&mut self, arithmetic: Arithmetic) {
        self.wte.arithmetic = arithmetic;
        self.head.iter_mut().for_each(|head| head.arithmetic = arithmetic);
        self.linears_mut().for_each(|linear| linear.weight.arithmetic = arithmetic);
    }

    /// Has all matrices rounded to BF16 when they are brought to a device: its products then read them as they are.
    pub fn round_matrices_on_device(&mut self) {
        self.wte.data.round_to_bf16_on_device();
        self.head.iter_mut().for_each(|head| head.data.round_to_bf16_on_device());
        self.linears_mut().for_each(|linear| linear.weight.data.round_to_bf16_on_device());
    }

    /// Has rows of zeros follow the head on a device, up to a multiple of `rows`; of codes with scales of zero.
    pub fn pad_head_on_device(&mut self, rows: usize) {
        let head = self.head.as_mut().unwrap_or(&mut self.wte);
        let more = head.rows.next_multiple_of(rows) - head.rows;
        head.data.pad_on_device(more * head.cols);
        if let Some(Scales::Q8(scales)) = &mut head.scales {
            scales.pad_on_device(more * scales.len() / head.rows.max(1));
        }
    }

    /// Has `rows` rows follow the matrices without codes behind a layer norm on a device, for a fused delta.
    pub fn pad_normed_on_device(&mut self, rows: usize) {
        for BlockWeights { c_attn, c_fc, .. } in &mut self.blocks {
            for Linear { weight, .. } in [c_attn, c_fc] {
                if weight.scales.is_none() {
                    weight.data.pad_on_device(rows * weight.cols);
                }
            }
        }
    }

    /// Brings tensors to `device`, one after another: all of them, or all but those of the blocks. What was mapped of
    /// files and is not needed any more is let go.
    ///
    /// # Errors
    /// As [`Frozen::bring`].
    pub fn bring(&mut self, device: Device, with_blocks: bool) -> Result<()> {
        Frozen::bring(&mut self.tensors_mut(with_blocks), device)
    }

    /// Copies all tensors from their file into large pages of the process, the matrices of the blocks in the order in
    /// which this CPU's kernels read them. Where there are no large pages nothing is done.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no memory for them; then those of some may be where they were.
    pub fn settle(&mut self) -> Result<()> {
        self.settle_blocks(None)?;
        FrozenMatrix::settle(&mut [], self.tensors_mut(false), None)
    }

    /// The same of the blocks alone, for passes of `rows` tokens if their number is known.
    ///
    /// # Errors
    /// As [`Weights::settle`].
    pub fn settle_blocks(&mut self, rows: Option<usize>) -> Result<()> {
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        for BlockWeights { ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj } in &mut self.blocks {
            for linear in [c_attn, attn_proj, c_fc, mlp_proj] {
                matrices.push(&mut linear.weight);
                vectors.push(&mut linear.bias);
            }
            vectors.extend([ln_1, ln_2].into_iter().flat_map(|norm| [&mut norm.gain, &mut norm.bias]));
        }
        FrozenMatrix::settle(&mut matrices, vectors, rows)
    }

    /// The head, or the token embedding in its place, (v, c).
    pub fn head(&self) -> &FrozenMatrix {
        self.head.as_ref().unwrap_or(&self.wte)
    }

    /// Has a transpose of the head beside it, where this CPU's kernels read that faster.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no memory for it.
    pub fn transpose_head(&mut self) -> Result<()> {
        self.head_transposed = TransposedMatrix::of(self.head())?;
        Ok(())
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.blocks
            .iter_mut()
            .flat_map(|block| [&mut block.c_attn, &mut block.attn_proj, &mut block.c_fc, &mut block.mlp_proj])
    }

    fn tensors_mut(&mut self, with_blocks: bool) -> Vec<&mut Frozen> {
        let mut tensors: Vec<&mut Frozen> = self.wte.tensors_mut().collect();
        tensors.push(&mut self.wpe);
        if with_blocks {
            tensors.extend(self.blocks.iter_mut().flat_map(BlockWeights::tensors_mut));
        }
        tensors.extend([&mut self.ln_f.gain, &mut self.ln_f.bias]);
        tensors.extend(self.head.iter_mut().flat_map(FrozenMatrix::tensors_mut));
        tensors
    }

    /// The finished copy in the cache, if there is one.
    fn converted(entry: &Entry, wanted: &[Wanted], config: &Config, dtype: BaseDType) -> Option<Self> {
        let fingerprint = entry.fingerprint()?;
        let copy = Source::open_file(entry.model()).ok()?;
        copy.is_copy(wanted, dtype).then(|| Self::map(&copy, wanted, config, fingerprint).ok())?
    }

    /// Views of the wanted tensors, which were checked before.
    fn map(source: &Source, wanted: &[Wanted], config: &Config, fingerprint: String) -> Result<Self> {
        let bytes = source.files.iter().map(map_file).collect::<Result<Vec<_>>>()?;
        let mut views = Vec::with_capacity(wanted.len());
        let frozen = |stored: &StoredTensor| {
            let dtype = match stored.dtype {
                safetensors::Dtype::I8 => DType::I8,
                safetensors::Dtype::U8 => DType::U8,
                safetensors::Dtype::F32 => DType::F32,
                _ => DType::F16,
            };
            let len = stored.shape.iter().product();
            Frozen::new(bytes[stored.file].clone(), stored.start, dtype, len)
        };
        for tensor in wanted {
            let stored: Option<&StoredTensor> = source.tensors.get(&tensor.name);
            let stored = stored.ok_or_else(|| Error::input(format!("{} is missing", tensor.name)))?;
            let beside = |name: String| source.tensors.get(&name).map(frozen).transpose();
            let scales = match (beside(scales_of(&tensor.name))?, beside(nested_of(&tensor.name))?) {
                (Some(codes), Some(nested)) => Some(Scales::Nf4 { codes, nested }),
                (scales, _) => scales.map(Scales::Q8),
            };
            let (rows, cols) = match tensor.shape[..] {
                [rows, cols] => (rows, cols),
                _ => (1, tensor.elements()),
            };
            views.push(FrozenMatrix {
                data: frozen(stored)?,
                scales,
                rows,
                cols,
                layout: Layout::Rows,
                arithmetic: Arithmetic::F32,
            });
        }
        assemble(views, config, fingerprint)
            .ok_or_else(|| Error::input("the weights hold fewer tensors than their config.json asks for"))
    }
}

/// Removes from the folder `cache` what processes left that were killed while they converted a base.
pub fn remove_leftovers(cache: &Path) {
    cache::remove_leftovers(cache);
}

/// Reads `config.json` in `folder`.
///
/// # Errors
/// When there is none, and as [`Config::from_json`].
pub fn read_config(folder: &Path) -> Result<Config> {
    let path = folder.join("config.json");
    Config::from_json(&config_text(folder)?, &path).map_err(|error| Error::damaged(&path, || error))
}

/// The text of `config.json` in `folder`.
///
/// # Errors
/// When there is none.
pub fn config_text(folder: &Path) -> Result<String> {
    let path = folder.join("config.json");
    std::fs::read_to_string(&path).map_err(|cause| Error::reading(&path, &cause))
}

/// Hands the views out in canonical order.
fn assemble(views: Vec<FrozenMatrix>, config: &Config, fingerprint: String) -> Option<Weights> {
    let mut next = views.into_iter();
    let wte = next.next()?;
    let wpe = next.next()?.data;
    let blocks = (0..config.layers).map(|_| block(&mut next)).collect::<Option<Vec<_>>>()?;
    let ln_f = norm(&mut next)?;
    let head = next.next();
    Some(Weights { wte, wpe, blocks, ln_f, head, head_transposed: None, fingerprint })
}

fn block(next: &mut dyn Iterator<Item = FrozenMatrix>) -> Option<BlockWeights> {
    Some(BlockWeights {
        ln_1: norm(next)?,
        c_attn: linear(next)?,
        attn_proj: linear(next)?,
        ln_2: norm(next)?,
        c_fc: linear(next)?,
        mlp_proj: linear(next)?,
    })
}

fn norm(next: &mut dyn Iterator<Item = FrozenMatrix>) -> Option<Norm> {
    Some(Norm { gain: next.next()?.data, bias: next.next()?.data })
}

fn linear(next: &mut dyn Iterator<Item = FrozenMatrix>) -> Option<Linear> {
    Some(Linear { weight: next.next()?, bias: next.next()?.data })
}

fn map_file(file: &SourceFile) -> Result<Arc<dyn Bytes>> {
    match &file.content {
        Content::Embedded(bytes) => return Ok(Arc::new(*bytes)),
        Content::Memory(bytes) => return Ok(Arc::clone(bytes) as Arc<dyn Bytes>),
        Content::Safetensors | Content::Pickle(_) => {}
    }
    let opened = File::open(&file.path).map_err(|cause| Error::reading(&file.path, &cause))?;
    // SAFETY: the mapping is read-only and its elements are plain numbers, so every content is valid.
    // That nobody truncates or rewrites the file during a run is asked of the user, as by every program
    // that maps weights; files of the cache are only ever replaced by rename.
    let map = unsafe { Mmap::map(&opened) }.map_err(|cause| Error::reading(&file.path, &cause))?;
    Ok(Arc::new(map))
}
