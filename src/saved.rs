//! Saves of a run as files: their names, and the adapter that one of them holds, read without anything of
//! training.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use engraft_adapters::{AdapterSet, AdapterSpec, BaseDescription, peft::Loaded};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::Deserialize;

use crate::error::{Error, Result};

/// Version of the file format; another one is refused.
pub const FORMAT: u32 = 2;
/// The metadata string with the description of a save.
pub const INFO: &str = "engraft_save";
/// The metadata string with the checksum.
pub const CHECKSUM: &str = "blake3";
/// The subfolder of a run folder with its saves.
pub const FOLDER: &str = "saves";
/// Name of the tensor with the trainable values.
pub const VALUES: &str = "values";

/// Name of the save of `step`.
pub fn file_name(step: u64) -> String {
    format!("step-{step:08}.safetensors")
}

/// The step of a save, by its name; `None` for other files.
pub fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
}

/// The saves in `folder`, oldest first.
///
/// # Errors
/// When the folder is there and cannot be read.
pub fn list(folder: &Path) -> Result<Vec<PathBuf>> {
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

/// The save of `step` in `folder`; `option` is what asked for it.
///
/// # Errors
/// [`Error::Input`] that names the steps of the saves that there are.
pub fn find(folder: &Path, step: u64, option: &str) -> Result<PathBuf> {
    let mut saves = list(folder)?;
    if let Some(at) = saves.iter().position(|path| step_of(path) == Some(step)) {
        return Ok(saves.swap_remove(at));
    }
    let mut steps: Vec<String> =
        saves.iter().filter_map(|path| step_of(path)).map(|step| step.to_string()).collect();
    let there = match (steps.pop(), steps.len()) {
        (None, _) => "the run has none; train it first".to_owned(),
        (Some(only), 0) => format!("the run has one of step {only}; give that"),
        (Some(last), _) => {
            format!("the run has those of steps {} and {last}; give one of them", steps.join(", "))
        }
    };
    Err(Error::input(format!("{option}: there is no save of step {step}, {there}")))
}

/// What a line of the checksum says before the bytes of a tensor.
pub fn line(name: &str, dtype: &str, bytes: usize) -> String {
    format!("\n{name} {dtype} {bytes}\n")
}

/// Run folder and step of `RUN@STEP`; `None` where RUN is no folder, or the whole is one.
pub fn named(name: &Path) -> Option<(PathBuf, u64)> {
    let (run, step) = name.to_str()?.rsplit_once('@')?;
    let step = step.parse().ok()?;
    (Path::new(run).is_dir() && !name.exists()).then(|| (run.into(), step))
}

/// The part of a description that says what the values are.
#[derive(Deserialize)]
struct Description {
    format: u32,
    base: String,
    spec: AdapterSpec,
    tensors: Vec<String>,
}

/// The adapter in the save of `step` of the run in the folder `run`, for the base `base`.
///
/// # Errors
/// [`Error::Input`] when there is no such save, it is damaged, or it was trained on another base, unless
/// `allow_base_mismatch`.
pub fn adapter(run: &Path, step: u64, base: &BaseDescription, allow_base_mismatch: bool) -> Result<Loaded> {
    let name = format!("--adapter {}@{step}", run.display());
    let path = find(&run.join(FOLDER), step, &name)?;
    let unreadable = |cause: io::Error| Error::reading(&path, &cause);
    let file = File::open(&path).map_err(unreadable)?;
    // SAFETY: saves are written once and renamed into place; a file cut short by others while mapped would end the
    // program, not corrupt it.
    let mapped = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
    let refused =
        |rule: String| Error::input(format!("{name}: {} is no usable save: {rule}", path.display()));
    let (description, values) = parse(&mapped).map_err(refused)?;
    let set = AdapterSet::new(&description.spec, base)?;
    let tensors = set.layout.tensors.iter().map(|slot| format!("{} {:?}", slot.name, slot.shape));
    if !tensors.eq(description.tensors.iter().cloned()) || values.len() != set.layout.len {
        return Err(Error::input(format!(
            "{name}: its tensors do not fit the base {}; give the base that the run was trained on with --base",
            base.name
        )));
    }
    let mut hints = Vec::new();
    if base.fingerprint.as_ref().is_some_and(|fingerprint| *fingerprint != description.base) {
        if !allow_base_mismatch {
            return Err(Error::input(format!(
                "{name}: was trained on another base than {}; give that with --base, or --allow-base-mismatch to use it \
                 all the same",
                base.name
            )));
        }
        hints.push(format!("{name} was trained on another base than {}", base.name));
    }
    Ok(Loaded { set, values, hints })
}

/// Description and values of a save, or the rule that it breaks.
fn parse(bytes: &[u8]) -> Result<(Description, Vec<f32>), String> {
    let damaged = |cause: safetensors::SafeTensorError| format!("it is damaged ({cause})");
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
    let strings = metadata.metadata().as_ref().ok_or("it has no metadata")?;
    let text = strings.get(INFO).ok_or("it has no description of its run")?;
    let description: Description =
        serde_json::from_str(text).map_err(|cause| format!("its description is unknown ({cause})"))?;
    if description.format != FORMAT {
        return Err(format!("its format is {}, this program reads {FORMAT}", description.format));
    }
    let file = SafeTensors::deserialize(bytes).map_err(damaged)?;
    let mut tensors = file.tensors();
    // In the order of their bytes; empty ones share their offset with the next one.
    tensors.sort_by_key(|(_, tensor)| (tensor.data().as_ptr() as usize, tensor.data().len()));
    if strings.get(CHECKSUM) != Some(&checksum(text, &tensors)) {
        return Err("its checksum does not fit its contents".to_owned());
    }
    match tensors.first() {
        Some((name, values)) if name == VALUES && values.dtype() == Dtype::F32 => {
            let values = values.data().as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four));
            Ok((description, values.collect()))
        }
        _ => Err(format!("it does not begin with {VALUES}")),
    }
}

fn checksum(text: &str, tensors: &[(String, TensorView)]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(text.as_bytes());
    for (name, tensor) in tensors {
        hasher.update(line(name, &format!("{:?}", tensor.dtype()), tensor.data().len()).as_bytes());
        hasher.update(tensor.data());
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_a_run_is_named_after_its_folder() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("run");
        fs::create_dir_all(run.join(FOLDER)).unwrap();
        let name = |text: &str| root.path().join(text);
        assert_eq!(named(&name("run@20")), Some((run.clone(), 20)));
        assert_eq!(named(&name("run@x")), None);
        assert_eq!(named(&name("other@20")), None);
        fs::create_dir(name("run@20")).unwrap();
        assert_eq!(named(&name("run@20")), None, "a folder of that name wins");
    }

    #[test]
    fn a_missing_step_names_those_that_are_there() {
        let root = tempfile::tempdir().unwrap();
        let text = |step| find(root.path(), step, "--resume-from 7").unwrap_err().to_string();
        assert!(
            text(7).contains("--resume-from 7: there is no save of step 7, the run has none"),
            "{}",
            text(7)
        );
        for step in [100, 20, 3] {
            fs::write(root.path().join(file_name(step)), "").unwrap();
        }
        assert!(text(7).contains("steps 3, 20 and 100"), "{}", text(7));
        assert!(find(root.path(), 20, "").unwrap().ends_with("step-00000020.safetensors"));
    }
}
