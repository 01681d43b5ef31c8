//! Writing an adapter: PEFT files that replace the old ones in one step.
//!
//! Over an adapter with the very same config only the tensor file is replaced, by one rename. Anything
//! else is a fresh folder put in the old one's place. Either way a crash leaves the old adapter or the
//! new one, never the config of one and the tensors of the other.

use std::{collections::HashMap, io::Write, path::Path};

use engraft_util::atomic::{self, WriteError};

use super::{
    CONFIG_FILE, LORA_FOLDER, META_FINGERPRINT, META_LORA, PREFIX_FOLDER, PROMPT, TENSOR_FILE, config,
    modules::modules,
    tensors::{self, Outgoing},
};
use crate::{AdapterSet, BaseDescription, Error, PrefixValues, Result};

/// Entries of an adapter's folder that a save may replace or remove.
const OWNED: [&str; 4] = [CONFIG_FILE, TENSOR_FILE, LORA_FOLDER, PREFIX_FOLDER];

/// The two files of one PEFT folder, ready to be written.
struct Files<'a> {
    config: String,
    tensors: Vec<Outgoing<'a>>,
    metadata: HashMap<String, String>,
}

/// Writes an adapter as PEFT files: one kind straight into `dir`, both into `dir/lora` and `dir/prefix`.
///
/// `values` is the flat store. `projected`, [P, 2Ld], is what a prefix projection makes of it, and is
/// needed if there is one: PEFT stores the result only. The folder is made if need be; an adapter in it
/// is replaced, and other files in it stay.
///
/// # Errors
/// [`Error::NotFinite`] for a value that is NaN or infinite and [`Error::Write`] if writing fails, both
/// with the old adapter left as it was; [`Error::ValueCount`] for slices of the wrong length.
pub fn save(
    dir: &Path,
    set: &AdapterSet,
    values: &[f32],
    projected: Option<&[f32]>,
    base: &BaseDescription,
) -> Result<()> {
    check(set, values)?;
    let lora = lora_files(set, values, base);
    let prefix = prefix_files(set, values, projected, base)?;
    match (&lora, &prefix) {
        (Some(lora), Some(prefix)) => Ok(atomic::replace_folder(dir, &OWNED, |fresh| {
            lora.write_below(&fresh.join(LORA_FOLDER))?;
            prefix.write_below(&fresh.join(PREFIX_FOLDER))
        })?),
        (Some(one), None) | (None, Some(one)) => one.replace(dir),
        (None, None) => Err(Error::Empty),
    }
}

impl Files<'_> {
    fn replace(&self, dir: &Path) -> Result<()> {
        if self.differs_in_tensors_only(dir) {
            return Ok(atomic::write_with(&dir.join(TENSOR_FILE), |out| self.write_tensors(out))?);
        }
        Ok(atomic::replace_folder(dir, &OWNED, |fresh| self.write_into(fresh))?)
    }

    fn differs_in_tensors_only(&self, dir: &Path) -> bool {
        let alone = [LORA_FOLDER, PREFIX_FOLDER].iter().all(|name| !dir.join(name).exists());
        alone && std::fs::read(dir.join(CONFIG_FILE)).is_ok_and(|old| old == self.config.as_bytes())
    }

    fn write_below(&self, folder: &Path) -> atomic::Result<()> {
        std::fs::create_dir(folder).map_err(|cause| WriteError::new(folder, cause))?;
        self.write_into(folder)?;
        atomic::sync_folder(folder).map_err(|cause| WriteError::new(folder, cause))
    }

    fn write_into(&self, folder: &Path) -> atomic::Result<()> {
        atomic::create(&folder.join(TENSOR_FILE), |out| self.write_tensors(out))?;
        atomic::create(&folder.join(CONFIG_FILE), |out| out.write_all(self.config.as_bytes()))
    }

    fn write_tensors(&self, out: &mut dyn Write) -> std::io::Result<()> {
        tensors::write(out, &self.tensors, &self.metadata)
    }
}

fn check(set: &AdapterSet, values: &[f32]) -> Result<()> {
    count("the flat store", values, set.layout.len)?;
    set.layout.tensors.iter().try_for_each(|slot| finite(&slot.name, &values[slot.range()]))
}

fn count(what: &'static str, values: &[f32], expected: usize) -> Result<()> {
    let found = values.len();
    if found == expected { Ok(()) } else { Err(Error::ValueCount { what, found, expected }) }
}

fn finite(tensor: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(Error::NotFinite { tensor: tensor.to_owned(), index, value: values[index] }),
    }
}

fn metadata(base: &BaseDescription) -> HashMap<String, String> {
    let format = ("format".to_owned(), "pt".to_owned());
    let fingerprint = base.fingerprint.as_ref();
    let fingerprint = fingerprint.map(|fingerprint| (META_FINGERPRINT.to_owned(), fingerprint.clone()));
    std::iter::once(format).chain(fingerprint).collect()
}

fn lora_files<'a>(set: &'a AdapterSet, values: &'a [f32], base: &BaseDescription) -> Option<Files<'a>> {
    let lora = set.spec.lora.as_ref()?;
    let modules = modules(set, base);
    let mut metadata = metadata(base);
    if modules.iter().any(|module| module.is_fused(set)) {
        metadata.insert(META_LORA.to_owned(), serde_json::to_string(lora).unwrap_or_default());
    }
    let config = config::lora_json(set, lora, &modules, base);
    let mut tensors = Vec::new();
    for module in modules {
        let (name, shape, twin) = (module.a(), vec![module.rank, module.inputs], module.clone());
        tensors.push(Outgoing { name, shape, values: Box::new(move || twin.fuse_a(set, values)) });
        let (name, shape) = (module.b(), vec![module.outputs, module.rank]);
        tensors.push(Outgoing { name, shape, values: Box::new(move || module.fuse_b(set, values)) });
    }
    Some(Files { config, tensors, metadata })
}

fn prefix_files<'a>(
    set: &'a AdapterSet,
    values: &'a [f32],
    projected: Option<&'a [f32]>,
    base: &BaseDescription,
) -> Result<Option<Files<'a>>> {
    let (Some(spec), Some(prefix)) = (&set.spec.prefix, &set.prefix) else { return Ok(None) };
    let width = 2 * base.layers * base.width;
    let prompt = match prefix.values {
        PrefixValues::Direct { prompt } => &values[set.layout.tensors[prompt].range()],
        PrefixValues::Projected { .. } => projected.unwrap_or_default(),
    };
    count("the projected prefix", prompt, prefix.length * width)?;
    finite(PROMPT, prompt)?;
    let shape = vec![prefix.length, width];
    let tensor = Outgoing { name: PROMPT.to_owned(), shape, values: Box::new(move || prompt.into()) };
    Ok(Some(Files {
        config: config::prefix_json(spec, base),
        tensors: vec![tensor],
        metadata: metadata(base),
    }))
}
