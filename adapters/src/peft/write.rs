//! Writing an adapter: PEFT files that replace the old ones in one step.
//!
//! Over an adapter with the very same config only the tensor file is replaced, by one rename. Anything
//! else is a fresh folder put in the old one's place. Either way a crash leaves the old adapter or the
//! new one, never the config of one and the tensors of the other.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write,
    path::Path,
};

use engraft_util::atomic::{self, WriteError};
use serde_json::Value;

use super::{
    CONFIG_FILE, META_FINGERPRINT, TENSOR_FILE,
    tensors::{self, Outgoing},
};
use crate::{AdapterSet, BaseDescription, Error, Result, TensorSlot, methods};

/// Folders of methods that are saved together.
fn method_folders() -> Vec<&'static str> {
    methods::kinds().into_iter().map(|kind| kind.name).collect()
}

/// Entries of an adapter's folder that a save may replace or remove.
fn owned() -> Vec<&'static str> {
    [CONFIG_FILE, TENSOR_FILE].into_iter().chain(method_folders()).collect()
}

/// The two files of one PEFT folder, ready to be written.
pub(crate) struct Files<'a> {
    config: String,
    tensors: Vec<Outgoing<'a>>,
    metadata: HashMap<String, String>,
}

/// Writes an adapter as PEFT files: one method straight into `dir`, several into folders of their names below.
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
    let methods = set.spec.methods();
    let files = methods.iter().map(|method| method.files(set, values, projected, base));
    let files = files.collect::<Result<Vec<_>>>()?;
    match &files[..] {
        [] => Err(Error::Empty),
        [one] => one.replace(dir),
        several => Ok(atomic::replace_folder(dir, &owned(), |fresh| {
            let mut each = methods.iter().zip(several);
            each.try_for_each(|(method, files)| files.write_below(&fresh.join(method.kind().name)))
        })?),
    }
}

impl<'a> Files<'a> {
    /// A config and tensors, with the metadata that all adapters carry.
    pub fn new(config: String, tensors: Vec<Outgoing<'a>>, base: &BaseDescription) -> Self {
        Self { config, tensors, metadata: metadata(base) }
    }

    /// A config, and the tensors of a method that PEFT stores as they are in the flat store.
    pub fn plain(
        config: String,
        kind: &methods::Kind,
        set: &'a AdapterSet,
        values: &'a [f32],
        base: &BaseDescription,
    ) -> Self {
        Self::of(config, set.layout.tensors.iter().filter(|slot| slot.method == kind.name), values, base)
    }

    /// A config, and these tensors of the flat store.
    pub fn of(
        config: String,
        slots: impl Iterator<Item = &'a TensorSlot>,
        values: &'a [f32],
        base: &BaseDescription,
    ) -> Self {
        Self::new(config, slots.map(|slot| Outgoing::plain(slot, values)).collect(), base)
    }

    /// Sets a field of the config.
    pub fn set_field(&mut self, name: &str, value: Value) {
        let fields: Option<BTreeMap<String, Value>> = serde_json::from_str(&self.config).ok();
        let mut fields = fields.unwrap_or_default(); // it was written as JSON
        fields.insert(name.to_owned(), value);
        self.config = serde_json::to_string_pretty(&fields).unwrap_or_default();
    }

    /// Adds an entry to the tensor file's metadata, which PEFT ignores.
    pub fn note(&mut self, key: &str, text: String) {
        self.metadata.insert(key.to_owned(), text);
    }
}

impl Files<'_> {
    /// Puts the two files into `dir`, in place of an adapter there.
    pub fn replace(&self, dir: &Path) -> Result<()> {
        if self.differs_in_tensors_only(dir) {
            return Ok(atomic::write_with(&dir.join(TENSOR_FILE), |out| self.write_tensors(out))?);
        }
        Ok(atomic::replace_folder(dir, &owned(), |fresh| self.write_into(fresh))?)
    }

    fn differs_in_tensors_only(&self, dir: &Path) -> bool {
        let alone = method_folders().iter().all(|name| !dir.join(name).exists());
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
    check_count("the flat store", values, set.layout.len)?;
    set.layout.tensors.iter().try_for_each(|slot| check_finite(&slot.name, &values[slot.range()]))
}

/// Refuses `values` that are not `expected` in number.
pub(crate) fn check_count(what: &'static str, values: &[f32], expected: usize) -> Result<()> {
    let found = values.len();
    if found == expected { Ok(()) } else { Err(Error::ValueCount { what, found, expected }) }
}

/// Refuses a value that is NaN or infinite.
pub(crate) fn check_finite(tensor: &str, values: &[f32]) -> Result<()> {
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
