//! Saves: all a run needs to go on exactly, one file each.
//!
//! `saves/step-XXXXXXXX.safetensors` holds `values`, F32 `[n]` in the order of the adapter's layout, then
//! the optimizer's tensors, `[count]` each, and two metadata strings: `engraft_save`, a [`SaveInfo`] as
//! JSON, and `blake3`, a checksum of all of it. It is written from the trainer's buffers and read
//! through a mapping: neither side holds a copy.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs::{self, File},
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use engraft_adapters::AdapterSpec;
use engraft_util::{
    atomic,
    safetensors::{self as safetensors_file, Entry, Order},
};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

use super::progress::Progress;
use crate::{
    device::{Bytes, DType, page_cache::Region},
    engine::VALUES,
    error::{Error, Result},
    observe::machine::Machine,
    optim::{LossScale, SavedTensor, StateTensor},
    saved::{self, CHECKSUM, INFO, file_name, list, step_of},
};

pub use crate::saved::FORMAT;

/// The description of a save and of the run it belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SaveInfo {
    /// Version of the format, [`FORMAT`] of the writer.
    pub format: u32,
    /// Number of optimizer steps done.
    pub step: u64,
    /// Optimizer steps the run was to have, on which the schedule depends.
    pub steps: u64,
    /// Options that change results, name -> value as written.
    pub options: BTreeMap<String, String>,
    /// Fingerprint of the base's weights.
    pub base: String,
    /// Fingerprint of the training rows.
    pub data: String,
    /// The machine that computed it.
    pub machine: Machine,
    /// The adapter that is trained.
    pub spec: AdapterSpec,
    /// Names of the trainable tensors in the order of the layout.
    pub tensors: Vec<String>,
    /// Name of the optimizer, on which the other tensors of the file depend.
    pub optimizer: String,
    /// The loss scale of a run in FP16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// Losses so far, and the best evaluation.
    #[serde(default)]
    pub progress: Progress,
}

/// A verified save: its description, and where its tensors are in the file.
pub struct Save {
    /// Path and description of the save.
    pub info: SaveInfo,
    source: Arc<dyn Bytes>,
    tensors: Vec<Extent>,
}

/// A tensor's bytes in its file.
struct Extent {
    name: String,
    dtype: DType,
    bytes: Range<usize>,
}

impl Save {
    /// The tensors in the order of the file.
    pub fn tensors(&self) -> Vec<SavedTensor<'_>> {
        self.tensors
            .iter()
            .map(|Extent { name, dtype, bytes }| SavedTensor {
                name,
                dtype: *dtype,
                bytes: &self.source.bytes()[bytes.clone()],
                pages: Some(Region::of_file(Arc::clone(&self.source), bytes.start, bytes.len())),
            })
            .collect()
    }

    /// How many trainable values it holds.
    pub fn values(&self) -> usize {
        self.tensors.first().map_or(0, |values| values.bytes.len() / DType::F32.size())
    }
}

impl std::fmt::Debug for Save {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Save({:?})", self.info)
    }
}

/// Writes a save into `folder`; it is there in full, on the disk, or not at all. `tensors` are the values
/// and what the optimizer keeps, in this order.
///
/// # Errors
/// [`Error::Failed`] when it cannot be written; saves written before stay.
pub fn write(folder: &Path, info: &SaveInfo, tensors: &[StateTensor]) -> Result<PathBuf> {
    let path = folder.join(file_name(info.step));
    atomic::write_with(&path, |file| stream(file, info, tensors)).map_err(|error| {
        Error::from(error).hint("what was saved before is still good; --resume goes on from there")
    })?;
    Ok(path)
}

fn stream(file: &mut dyn Write, info: &SaveInfo, tensors: &[StateTensor]) -> io::Result<()> {
    let info = serde_json::to_string(info)?;
    // Tensors of a device are copied to the host once.
    let held: Vec<_> = tensors.iter().map(|(_, view, _)| view.to_bytes()).collect();
    let stored = || {
        let stored = tensors.iter().zip(&held);
        stored.map(|((name, view, pages), bytes)| SavedTensor {
            name,
            dtype: view.dtype(),
            bytes,
            pages: pages.clone(),
        })
    };
    file.write_all(&header(&info, &checksum(&info, stored()), stored())?)?;
    stored().try_for_each(|tensor| tensor.each_piece(|_, piece| file.write_all(piece)))
}

/// BLAKE3 over the description, and for each tensor a line `NAME TYPE BYTES` and its bytes.
fn checksum<'a>(info: &str, tensors: impl Iterator<Item = SavedTensor<'a>>) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(info.as_bytes());
    for tensor in tensors {
        let SavedTensor { name, dtype, bytes, .. } = &tensor;
        hasher.update(saved::line(name, &format!("{dtype:?}"), bytes.len()).as_bytes());
        let Ok(()) = tensor.each_piece(|_, piece| -> Result<(), Infallible> {
            hasher.update(piece);
            Ok(())
        });
    }
    hasher.finalize().to_hex().to_string()
}

/// The length and the JSON object a safetensors file begins with.
fn header<'a>(
    info: &str,
    checksum: &str,
    tensors: impl Iterator<Item = SavedTensor<'a>>,
) -> io::Result<Vec<u8>> {
    let entry = |tensor: SavedTensor| {
        let SavedTensor { name, dtype, bytes, .. } = tensor;
        let known = TYPES.iter().find(|(own, _)| *own == dtype).ok_or(io::ErrorKind::InvalidInput)?;
        let shape = vec![bytes.len() / dtype.size()];
        Ok(Entry { name: name.to_owned(), dtype: known.1, shape, bytes: bytes.len() })
    };
    let entries = tensors.map(entry).collect::<io::Result<Vec<_>>>()?;
    safetensors_file::header(&[(INFO, info), (CHECKSUM, checksum)].into(), &entries, Order::Names, 8)
}

/// Types that saves have, and their names in the file.
const TYPES: [(DType, Dtype); 2] = [(DType::F32, Dtype::F32), (DType::U8, Dtype::U8)];

/// Maps and verifies the save at `path`.
///
/// # Errors
/// When it cannot be read, is damaged, or has another format.
pub fn read(path: &Path) -> Result<Save> {
    let unreadable = |cause: io::Error| Error::reading(path, &cause);
    let file = File::open(path).map_err(unreadable)?;
    // SAFETY: saves are written once and renamed into place, and the run folder is locked by this
    // process; a file cut short by others while mapped would end the program, not corrupt it.
    let mapped = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
    let in_place = |save: Save| match step_of(path) == Some(save.info.step) {
        true => Ok(save),
        false => Err(format!("it is of step {}, which is not what its name says", save.info.step)),
    };
    parse(Arc::new(mapped))
        .and_then(in_place)
        .map_err(|rule| Error::input(format!("{}: is no usable save: {rule}; remove it", path.display())))
}

/// The save in `source`, or the rule it breaks.
fn parse(source: Arc<dyn Bytes>) -> Result<Save, String> {
    let bytes = source.bytes();
    let damaged = |cause: safetensors::SafeTensorError| format!("it is damaged ({cause})");
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let strings = metadata.metadata().as_ref().ok_or("it has no metadata")?;
    let text = strings.get(INFO).ok_or("it has no description of its run")?;
    let info = describe(text)?;
    let tensors = places(bytes)?;
    let save = Save { info, source: source.clone(), tensors };
    if strings.get(CHECKSUM) != Some(&checksum(text, save.tensors().into_iter())) {
        return Err("its checksum does not fit its contents".to_owned());
    }
    match save.tensors.first() {
        Some(first) if first.name == VALUES && first.dtype == DType::F32 => Ok(save),
        _ => Err(format!("it does not begin with {VALUES}")),
    }
}

/// The description, whose format decides whether the rest can be understood.
fn describe(text: &str) -> Result<SaveInfo, String> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let unknown = |cause: serde_json::Error| format!("its description is unknown ({cause})");
    let Format { format } = serde_json::from_str(text).map_err(unknown)?;
    if format != FORMAT {
        return Err(format!("its format is {format}, this program reads {FORMAT}"));
    }
    serde_json::from_str(text).map_err(unknown)
}

/// Ranges of the tensors in the file, in the order of their bytes.
fn places(bytes: &[u8]) -> Result<Vec<Extent>, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|cause| format!("it is damaged ({cause})"))?;
    let mut places = Vec::new();
    for (name, tensor) in file.tensors() {
        let known = TYPES.iter().find(|(_, theirs)| *theirs == tensor.dtype());
        let (dtype, _) = known.ok_or_else(|| format!("{name} has the unknown type {:?}", tensor.dtype()))?;
        let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        places.push((start, Extent { name, dtype: *dtype, bytes: start..start + tensor.data().len() }));
    }
    // Empty tensors share their offset with the next one.
    places.sort_by_key(|(start, place)| (*start, place.bytes.end));
    Ok(places.into_iter().map(|(_, place)| place).collect())
}

/// The newest good save in `folder`, with a sentence for each newer one that is damaged.
///
/// # Errors
/// When there are saves but none of them is good.
pub fn newest(folder: &Path) -> Result<Option<(Save, Vec<String>)>> {
    let mut skipped = Vec::new();
    let mut last = None;
    for path in list(folder)?.iter().rev() {
        match read(path) {
            Ok(save) => return Ok(Some((save, skipped))),
            Err(error) => {
                skipped.push(error.to_string());
                last = Some(error);
            }
        }
    }
    match last {
        None => Ok(None),
        Some(error) => Err(error.hint("no save in this folder is usable; start a new run in another folder")),
    }
}

/// The save of `step` in `folder`.
///
/// # Errors
/// [`Error::Input`] that names the steps of the saves that there are; and as [`read`].
pub fn of_step(folder: &Path, step: u64) -> Result<Save> {
    read(&saved::find(folder, step, &format!("--resume-from {step}"))?)
}

/// Removes saves after `step`, which this run did not write (damaged ones, or those after the step that
/// it went back to), and all but the newest `keep` others.
///
/// # Errors
/// When one cannot be removed.
pub fn prune(folder: &Path, step: u64, keep: usize) -> Result<()> {
    let saves = list(folder)?;
    let (good, later) = saves.split_at(saves.partition_point(|path| step_of(path) <= Some(step)));
    good[..good.len().saturating_sub(keep)]
        .iter()
        .chain(later)
        .try_for_each(|path| fs::remove_file(path).map_err(|cause| Error::writing(path, &cause)))
}

#[cfg(test)]
mod tests;
