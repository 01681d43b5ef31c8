//! Reading an adapter: everything the files say must fit the base, and all that does not is said at once.

use std::path::{Path, PathBuf};

use engraft_util::words::short_hash;

use super::{
    CONFIG_FILE, META_FINGERPRINT,
    config::Config,
    folders,
    tensors::{TensorFile, is_readable},
};
use crate::{AdapterSet, AdapterSpec, BaseDescription, Error, Problem, Result, methods};

/// An adapter, read and found to fit.
#[derive(Debug)]
pub struct Loaded {
    /// The adapters, resolved against the base.
    pub set: AdapterSet,
    /// The flat store, as `set.layout` lays it out.
    pub values: Vec<f32>,
    /// Sentences for the user about the files; none of them is an error.
    pub hints: Vec<String>,
}

/// Reads the adapter in a folder, or the methods saved together in folders of their names below it.
///
/// F32, F16 and BF16 tensors are read. A prefix that was made by a projection comes back as the
/// prefix it made: PEFT's files do not hold the projection.
///
/// # Errors
/// [`Error::Read`], [`Error::NotAnAdapter`], [`Error::Json`], [`Error::SafeTensors`] for files that
/// cannot be read; [`Error::Mismatch`] with every reason why the adapter does not fit this base. A base
/// with another fingerprint is one of them, unless `allow_base_mismatch`.
pub fn load(dir: &Path, base: &BaseDescription, allow_base_mismatch: bool) -> Result<Loaded> {
    let mut sources = folders(dir)?.into_iter().map(Source::open).collect::<Result<Vec<_>>>()?;
    let mut findings = Findings { allow_base_mismatch, ..Findings::default() };
    refuse_wrong_folders(&sources, &mut findings);
    let fitted: Vec<Option<AdapterSet>> =
        sources.iter_mut().map(|source| source.fit(base, &mut findings)).collect();
    findings.or_refuse(dir)?;
    let mut spec = AdapterSpec::default();
    let mut values = Vec::new();
    for (source, set) in sources.iter_mut().zip(fitted.into_iter().flatten()) {
        let mut own = vec![0.0; set.layout.len];
        for method in set.spec.methods() {
            method.read(&set, base, &mut source.tensors, &mut own, &mut findings)?;
        }
        values.extend(own);
        spec = spec.or(set.spec);
    }
    findings.or_refuse(dir)?;
    // Folders come in the order of the registry, as the tensors of a set do.
    Ok(Loaded { set: AdapterSet::new(&spec, base)?, values, hints: findings.hints })
}

/// The two files of one PEFT folder.
struct Source {
    folder: PathBuf,
    config: Config,
    tensors: TensorFile,
}

impl Source {
    fn open(folder: PathBuf) -> Result<Self> {
        let config = Config::read(&folder.join(CONFIG_FILE))?;
        Ok(Self { config, tensors: TensorFile::in_folder(&folder)?, folder })
    }

    /// The set of the one method here, if its header fits the base.
    fn fit(&mut self, base: &BaseDescription, findings: &mut Findings) -> Option<AdapterSet> {
        findings.problems.append(&mut self.config.problems);
        check_base(self, base, findings);
        let stored = self.config.stored.as_ref()?;
        findings.hints.extend(stored.hint().map(str::to_owned));
        stored.fit(&self.tensors, base, findings)
    }
}

/// Problems and hints found while reading.
#[derive(Default)]
pub(crate) struct Findings {
    allow_base_mismatch: bool,
    pub problems: Vec<Problem>,
    pub hints: Vec<String>,
}

impl Findings {
    /// The problems so far as an error about `dir`.
    pub fn or_refuse(&mut self, dir: &Path) -> Result<()> {
        match std::mem::take(&mut self.problems) {
            problems if problems.is_empty() => Ok(()),
            problems => Err(Error::Mismatch { path: dir.to_owned(), problems }),
        }
    }

    /// The value of `result`, whose error is noted.
    pub fn accept<T>(&mut self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.problems.push(Problem::Spec(error.to_string()))).ok()
    }

    /// Notes a field of the config that does not fit the base.
    pub fn field(&mut self, name: &str, value: impl ToString, expected: impl Into<String>) {
        let (name, value, expected) = (name.to_owned(), value.to_string(), expected.into());
        self.problems.push(Problem::Field { name, value, expected });
    }

    /// Notes another number of layers; once, though several methods can be for the same other base.
    pub fn layers(&mut self, found: usize, expected: usize) {
        let problem = Problem::Layers { found, expected };
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// Notes what is wrong with a tensor that the config promises.
    pub fn tensor(&mut self, tensors: &TensorFile, name: String, expected: &[usize]) {
        let Some(info) = tensors.info(&name) else {
            return self.problems.push(Problem::Missing(name));
        };
        if !is_readable(info.dtype) {
            self.problems.push(Problem::Dtype { tensor: name.clone(), found: info.dtype.to_string() });
        }
        if info.shape != expected {
            let (found, expected) = (info.shape.clone(), expected.to_vec());
            self.problems.push(Problem::Shape { tensor: name, found, expected });
        }
    }

    /// Notes the tensors that are not among `expected`.
    pub fn extras(&mut self, tensors: &TensorFile, expected: &[String]) {
        let extra =
            tensors.tensors().into_iter().map(|(name, _)| name).filter(|name| !expected.contains(name));
        self.problems.extend(extra.map(Problem::Extra));
    }

    /// Checks that the file has the tensors of `set`, which PEFT stores as they are, and no others.
    pub fn plain(&mut self, tensors: &TensorFile, set: &AdapterSet) {
        let slots = &set.layout.tensors;
        slots.iter().for_each(|slot| self.tensor(tensors, slot.name.clone(), &slot.shape));
        self.extras(tensors, &slots.iter().map(|slot| slot.name.clone()).collect::<Vec<_>>());
    }

    /// Reads the tensors of `set`, which PEFT stores as they are, into `values`, its flat store.
    pub fn read_plain(
        &mut self,
        tensors: &mut TensorFile,
        set: &AdapterSet,
        values: &mut [f32],
    ) -> Result<()> {
        for slot in &set.layout.tensors {
            if let Some(found) = self.read_finite(tensors, &slot.name)? {
                values[slot.range()].copy_from_slice(&found);
            }
        }
        Ok(())
    }

    /// Values of a tensor; nothing where it cannot be read or where one is not finite, which is noted.
    pub fn read_finite(&mut self, tensors: &mut TensorFile, name: &str) -> Result<Option<Vec<f32>>> {
        let values = tensors.read(name)?;
        let bad = values.as_ref().and_then(|values| values.iter().position(|value| !value.is_finite()));
        if let Some(index) = bad {
            self.problems.push(Problem::NotFinite { tensor: name.to_owned(), index });
            return Ok(None);
        }
        Ok(values)
    }
}

/// Checks that each of several methods saved together is in the folder of its name.
fn refuse_wrong_folders(sources: &[Source], findings: &mut Findings) {
    if sources.len() < 2 {
        return;
    }
    for source in sources {
        let Some(found) = source.config.stored.as_ref().map(|stored| stored.kind()) else { continue };
        let is_folder = |name: &str| source.folder.file_name().is_some_and(|folder| folder == name);
        let expected = methods::kinds().into_iter().find(|kind| is_folder(kind.name));
        if let Some(expected) = expected.filter(|expected| expected.name != found.name) {
            // Kinds of one type are told apart by other fields.
            let (field, found, expected) = match found.peft_type == expected.peft_type {
                true => (format!("the kind in {}/", expected.name), found.name, expected.name),
                false => (format!("{}/ peft_type", expected.name), found.peft_type, expected.peft_type),
            };
            findings.field(&field, found, format!("{expected} is expected"));
        }
    }
}

fn check_base(source: &Source, base: &BaseDescription, findings: &mut Findings) {
    let named = source.config.base_name.as_deref().unwrap_or("none");
    match (source.tensors.metadata(META_FINGERPRINT), base.fingerprint.as_deref()) {
        (Some(found), Some(expected)) if found != expected => {
            if findings.allow_base_mismatch {
                let (found, expected) = (short_hash(found), short_hash(expected));
                findings.hints.push(if named == base.name {
                    format!(
                        "the adapter was made for other weights of {named}, {found}, not these, {expected}"
                    )
                } else {
                    format!("the adapter was made for {named} ({found}), not for {} ({expected})", base.name)
                });
            } else {
                let (found, expected) = (found.to_owned(), expected.to_owned());
                findings.problems.push(Problem::Base { found, expected });
            }
        }
        (Some(_), Some(_)) => {}
        (found, _) => {
            let who = if found.is_none() { "adapter" } else { "base" };
            let names = if named == base.name {
                format!("both name {named}")
            } else {
                format!("the adapter names base {named}, this is {}", base.name)
            };
            findings.hints.push(format!(
                "the {who} carries no base fingerprint, so that nothing but shapes was compared ({names})"
            ));
        }
    }
}
