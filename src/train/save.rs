//! Saves: all a run needs to go on exactly, one file each.
//!
//! `saves/step-XXXXXXXX.safetensors` holds the tensors `values`, `first_moment` and `second_moment`,
//! F32 `[n]` in the order of the adapter's layout, and two metadata strings: `engraft_save`, a
//! [`SaveInfo`] as JSON, and `blake3`, the checksum of that string followed by the three tensors.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use engraft_adapters::{AdapterSpec, atomic};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Machine, TrainerState};
use crate::error::{Error, Result};

/// Version of the file format; another one is refused.
pub const FORMAT: u32 = 1;

const INFO: &str = "engraft_save";
const CHECKSUM: &str = "blake3";
const TENSORS: [&str; 3] = ["values", "first_moment", "second_moment"];
const EXTENSION: &str = "safetensors";

/// What a save says about itself and about the run it belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SaveInfo {
    /// [`FORMAT`] of the writer.
    pub format: u32,
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps the run was to have, on which the schedule depends.
    pub steps: u64,
    /// Options that change results, name -> value as written.
    pub options: BTreeMap<String, String>,
    /// Fingerprint of the base.
    pub base: String,
    /// Fingerprint of the training rows.
    pub data: String,
    /// What computed it.
    pub machine: Machine,
    /// The adapter.
    pub spec: AdapterSpec,
    /// Names of the trainable tensors in the order of the layout.
    pub tensors: Vec<String>,
}

/// A save in memory.
#[derive(Debug)]
pub struct Save {
    /// Where and of what.
    pub info: SaveInfo,
    /// Values and moments.
    pub state: TrainerState,
}

/// Writes a save into `folder`; it is there in full, on the disk, or not at all.
///
/// # Errors
/// [`Error::Failed`] when it cannot be written; saves written before stay.
pub fn write(folder: &Path, info: &SaveInfo, state: &TrainerState) -> Result<PathBuf> {
    let path = folder.join(file_name(info.step));
    atomic::write_with(&path, |file| stream(file, info, state)).map_err(|error| {
        Error::from(error).hint("what was saved before is still good; --resume goes on from there")
    })?;
    Ok(path)
}

fn stream(file: &mut dyn Write, info: &SaveInfo, state: &TrainerState) -> io::Result<()> {
    let info = serde_json::to_string(info)?;
    let tensors = [&state.values, &state.first_moment, &state.second_moment];
    let mut hasher = blake3::Hasher::new();
    hasher.update(info.as_bytes());
    for values in tensors {
        pieces(values).for_each(|piece| {
            hasher.update(&piece);
        });
    }
    file.write_all(&header(&info, &hasher.finalize().to_hex(), tensors.map(Vec::len)))?;
    tensors.iter().flat_map(|values| pieces(values)).try_for_each(|piece| file.write_all(&piece))
}

/// The little-endian bytes of `values`, 64 Ki values at a time.
fn pieces(values: &[f32]) -> impl Iterator<Item = Vec<u8>> {
    values.chunks(1 << 16).map(|chunk| chunk.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// The length and the JSON object a safetensors file begins with.
fn header(info: &str, checksum: &str, lengths: [usize; 3]) -> Vec<u8> {
    let mut object = json!({ "__metadata__": { INFO: info, CHECKSUM: checksum } });
    let mut start = 0;
    for (name, length) in TENSORS.into_iter().zip(lengths) {
        let end = start + 4 * length;
        object[name] = json!({ "dtype": "F32", "shape": [length], "data_offsets": [start, end] });
        start = end;
    }
    let mut text = object.to_string().into_bytes();
    // The tensors begin at a multiple of 8, as the format wishes.
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes(), text.as_slice()].concat()
}

/// Reads and verifies the save at `path`.
///
/// # Errors
/// When it cannot be read, is damaged, or has another format.
pub fn read(path: &Path) -> Result<Save> {
    let bytes = fs::read(path).map_err(|cause| Error::reading(path, &cause))?;
    let in_place = |save: Save| match step_of(path) == Some(save.info.step) {
        true => Ok(save),
        false => Err(format!("it is of step {}, which is not what its name says", save.info.step)),
    };
    parse(&bytes)
        .and_then(in_place)
        .map_err(|rule| Error::input(format!("{}: is no usable save: {rule}; remove it", path.display())))
}

/// The save in `bytes`, or the rule they break.
fn parse(bytes: &[u8]) -> Result<Save, String> {
    let damaged = |cause: safetensors::SafeTensorError| format!("it is damaged ({cause})");
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let strings = metadata.metadata().as_ref().ok_or("it has no metadata")?;
    let text = strings.get(INFO).ok_or("it has no description of its run")?;
    let file = SafeTensors::deserialize(bytes).map_err(damaged)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(text.as_bytes());
    let mut tensors = Vec::new();
    for name in TENSORS {
        let tensor = file.tensor(name).map_err(damaged)?;
        hasher.update(tensor.data());
        tensors.push(floats(tensor.data()));
    }
    if strings.get(CHECKSUM).map(String::as_str) != Some(hasher.finalize().to_hex().as_str()) {
        return Err("its checksum does not fit its contents".to_owned());
    }
    let info: SaveInfo =
        serde_json::from_str(text).map_err(|cause| format!("its description is unknown ({cause})"))?;
    if info.format != FORMAT {
        return Err(format!("its format is {}, this program reads {FORMAT}", info.format));
    }
    let [values, first_moment, second_moment] = <[Vec<f32>; 3]>::try_from(tensors).unwrap_or_default();
    if first_moment.len() != values.len() || second_moment.len() != values.len() {
        return Err("its moments are not as many as its values".to_owned());
    }
    let state = TrainerState { step: info.step, values, first_moment, second_moment };
    Ok(Save { info, state })
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
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

/// Removes saves after `step`, which this run did not write (damaged ones, or those of steps it went
/// back behind), and all but the newest `keep` others.
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

/// The saves in `folder`, oldest first.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|cause| Error::reading(folder, &cause))?,
    };
    let mut saves = Vec::new();
    for entry in entries {
        let path = entry.map_err(|cause| Error::reading(folder, &cause))?.path();
        if let Some(step) = step_of(&path) {
            saves.push((step, path));
        }
    }
    saves.sort();
    Ok(saves.into_iter().map(|(_, path)| path).collect())
}

fn file_name(step: u64) -> String {
    format!("step-{step:08}.{EXTENSION}")
}

fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
}

#[cfg(test)]
mod tests;
