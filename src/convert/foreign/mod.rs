//! Adapters in files that are not PEFT's, read for our bases: GGUF, `.pt` files of loralib, folders of mlx-lm.
//!
//! [`Foreign::open`] reads one without a base, for a description; [`Foreign::load`] makes it the set of a base, as
//! `peft::load` does of PEFT's files, so that every command can take either.

mod gguf;
mod loralib;
mod mlx;

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use engraft_adapters::{
    BaseDescription, Error as AdapterError, PlainLora, Problem, SiteDescription, from_plain, peft::Loaded,
};
use engraft_util::words::short_hash;

pub use self::gguf::{ModelFile, model as gguf_model};
use crate::error::{Error, Result};

/// A format of adapters other than PEFT's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A file for llama.cpp.
    Gguf,
    /// A PyTorch file with the parameters of loralib's layers.
    Loralib,
    /// A folder of mlx-lm.
    Mlx,
}

/// An adapter as a file of another format has it.
#[derive(Debug)]
pub struct Foreign {
    /// The file, or the folder.
    pub path: PathBuf,
    /// The program whose files look like this.
    pub format: Format,
    /// Its pairs of tensors, ordered by layer and module.
    pub pairs: Vec<Pair>,
    /// Name of the base that it was made for.
    pub base: Option<String>,
    /// Fingerprint of that base.
    pub fingerprint: Option<String>,
    /// Probability that an input element of the deltas is dropped in training.
    pub dropout: f64,
    /// Sentences for the user about the file.
    pub hints: Vec<String>,
}

/// A and B of a module.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// Layer of the base, from 0.
    pub layer: usize,
    /// Name of the module in a layer, as ours.
    pub module: String,
    /// The scale of the delta; `None` where the file does not tell.
    pub scale: Option<f64>,
    /// A: rows of inputs.
    pub a: Matrix,
    /// B: rows of ranks.
    pub b: Matrix,
}

/// A matrix, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Elements row by row.
    pub values: Vec<f32>,
}

/// What a file does not tell, said by the user.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Untold {
    /// Numerator of the scale of deltas of rank r, whose scale is alpha / r.
    pub alpha: Option<f64>,
    /// The parts that stacked deltas of a fused module are for, in their order.
    pub parts: Option<Vec<String>>,
}

impl Format {
    /// The format of what is at `path`; `None` where it is a folder of PEFT's, or nothing that is known.
    pub fn of(path: &Path) -> Option<Self> {
        if path.is_dir() {
            let holds = |name: &str| path.join(name).is_file();
            return (holds(mlx::TENSORS) && !holds("adapter_model.safetensors")).then_some(Self::Mlx);
        }
        let mut start = [0; 4];
        File::open(path).ok()?.read_exact(&mut start).ok()?;
        match &start {
            b"GGUF" => Some(Self::Gguf),
            b"PK\x03\x04" => Some(Self::Loralib),
            _ => None,
        }
    }

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gguf => "GGUF",
            Self::Loralib => "loralib",
            Self::Mlx => "mlx-lm",
        }
    }
}

impl Foreign {
    /// Reads what is at `path`; `None` where [`Format::of`] knows no format.
    ///
    /// # Errors
    /// [`Error::Input`] for a file of that format that cannot be read, or that holds no LoRA.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let Some(format) = Format::of(path) else { return Ok(None) };
        let mut found = match format {
            Format::Gguf => gguf::read(path)?,
            Format::Loralib => loralib::read(path)?,
            Format::Mlx => mlx::read(path)?,
        };
        if found.pairs.is_empty() {
            return Err(Error::input(format!(
                "{}: holds no LoRA of a GPT-2; give the file of an adapter",
                path.display()
            )));
        }
        found.pairs.sort_by(|a, b| (a.layer, &a.module).cmp(&(b.layer, &b.module)));
        Ok(Some(found))
    }

    /// Number of values in its tensors.
    pub fn parameters(&self) -> usize {
        self.pairs.iter().map(|pair| pair.a.values.len() + pair.b.values.len()).sum()
    }

    /// The adapter, checked against `base`.
    ///
    /// # Errors
    /// [`Error::Input`] for one that does not fit, whose scale is untold, or that was made for another base, unless
    /// `allow_base_mismatch`.
    pub fn load(
        mut self,
        untold: &Untold,
        base: &BaseDescription,
        allow_base_mismatch: bool,
    ) -> Result<Loaded> {
        let mut hints = std::mem::take(&mut self.hints);
        match (&self.fingerprint, &base.fingerprint) {
            (Some(found), Some(expected)) if found != expected && allow_base_mismatch => {
                let (found, expected) = (short_hash(found), short_hash(expected));
                hints.push(format!("the adapter was made for another base ({found}), not for {expected}"));
            }
            (Some(found), Some(expected)) if found != expected => {
                let problem = Problem::Base { found: found.clone(), expected: expected.clone() };
                return Err(AdapterError::Mismatch { path: self.path, problems: vec![problem] }.into());
            }
            (Some(_), Some(_)) => {}
            _ => hints.push(format!(
                "the {} file carries no base fingerprint, so that nothing but shapes was compared",
                self.format.name()
            )),
        }
        let mut deltas = Vec::new();
        for pair in &self.pairs {
            deltas.extend(self.deltas(pair, untold, base)?);
        }
        let mut loaded = from_plain(deltas, self.dropout, &self.path, base)?;
        loaded.hints = hints;
        Ok(loaded)
    }

    /// The deltas of a pair: one, or one for each part of a fused module.
    fn deltas(&self, pair: &Pair, untold: &Untold, base: &BaseDescription) -> Result<Vec<PlainLora>> {
        let wrong = |what: String| Error::input(format!("{}: {what}", self.path.display()));
        let of = |site: &&SiteDescription| site.name == pair.module;
        let Some(site) = base.sites.iter().find(of) else {
            return Err(wrong(format!(
                "{} is no module of the base {}; give its own",
                pair.module, base.name
            )));
        };
        let index = base.sites.iter().position(|one| one.name == site.name).unwrap_or_default();
        let module = site.module(pair.layer);
        let rank = pair.b.columns;
        let stacked = if rank > 0 && pair.a.rows.is_multiple_of(rank) { pair.a.rows / rank } else { 0 };
        let shapes = || {
            let [a, b] = [&pair.a, &pair.b].map(|matrix| [matrix.rows, matrix.columns]);
            format!("{module} has A {a:?} and B {b:?}, where the base has {} inputs", site.inputs)
        };
        if stacked == 0 || pair.a.columns != site.inputs {
            let outputs = site.outputs;
            return Err(wrong(format!(
                "{} and {outputs} outputs; give the base that it was trained on",
                shapes()
            )));
        }
        let scale = match (pair.scale, untold.alpha) {
            (Some(scale), _) => scale,
            (None, Some(alpha)) => alpha / rank as f64,
            (None, None) => {
                return Err(wrong(format!(
                    "does not tell the alpha of its LoRA; make it a PEFT adapter with engraft export --to peft --adapter {} \
                     --lora-alpha N, N as it was trained",
                    self.path.display()
                )));
            }
        };
        let delta = |part: Option<String>, a: &[f32], b: &[f32]| PlainLora {
            layer: pair.layer,
            site: index,
            part,
            rank,
            alpha: scale * rank as f64,
            a: a.to_vec(),
            b: b.to_vec(),
        };
        if stacked == 1 && pair.b.rows == site.outputs {
            return Ok(vec![delta(None, &pair.a.values, &pair.b.values)]);
        }
        let parts =
            self.parts(pair, stacked, site, untold).map_err(|what| wrong(format!("{}; {what}", shapes())))?;
        let rows = pair.b.rows / stacked;
        let a = pair.a.values.chunks_exact(rank * site.inputs);
        let b = pair.b.values.chunks_exact(rows * rank);
        Ok(parts.into_iter().zip(a.zip(b)).map(|(part, (a, b))| delta(Some(part), a, b)).collect())
    }

    /// The parts of a module that `stacked` deltas are for.
    fn parts(
        &self,
        pair: &Pair,
        stacked: usize,
        site: &SiteDescription,
        untold: &Untold,
    ) -> Result<Vec<String>, String> {
        let width = site.parts.first().map_or(0, |part| part.columns.len());
        if site.parts.len() < 2 || pair.b.rows != stacked * width || self.format != Format::Loralib {
            return Err(format!("it has {} outputs; give the base that it was trained on", site.outputs));
        }
        let all: Vec<&str> = site.parts.iter().map(|part| part.name.as_str()).collect();
        let given = untold.parts.clone();
        let chosen = match (given, stacked) {
            (Some(given), _) => given,
            // The paper's choice, and that of loralib's own example: queries and values.
            (None, 2) if all.len() == 3 => vec![all[0].to_owned(), all[2].to_owned()],
            (None, count) if count == all.len() => all.iter().map(|name| (*name).to_owned()).collect(),
            (None, count) => {
                return Err(format!(
                    "it is for {count} of the parts {}; name them with --enable-lora in engraft export --to peft",
                    all.join(", ")
                ));
            }
        };
        let order: Vec<Option<usize>> =
            chosen.iter().map(|name| all.iter().position(|known| known == name)).collect();
        if chosen.len() != stacked || order.contains(&None) || !order.is_sorted() {
            return Err(format!(
                "its deltas are for {stacked} parts; name so many of {} in this order with --enable-lora",
                all.join(",")
            ));
        }
        Ok(chosen)
    }
}

impl Matrix {
    /// The matrix with rows and columns swapped.
    fn transposed(&self) -> Self {
        let element = |at: usize| self.values[at % self.rows * self.columns + at / self.rows];
        Self { rows: self.columns, columns: self.rows, values: (0..self.values.len()).map(element).collect() }
    }
}

/// Says of the name of a tensor: layer, module, and whether it is A; nothing for one that is no half of a pair.
type Named<'a> = dyn Fn(&str) -> Option<(usize, String, bool)> + 'a;

/// Puts tensors together as pairs. `named` says for the name of a tensor: layer, module, and whether it is A; other
/// tensors come back.
fn paired(path: &Path, tensors: Vec<(String, Matrix)>, named: &Named) -> Result<(Vec<Pair>, Vec<String>)> {
    let (mut halves, mut others) = (Vec::new(), Vec::new());
    for (name, matrix) in tensors {
        match named(&name) {
            Some((layer, module, is_a)) => halves.push(((layer, module, !is_a), name, matrix)),
            None => others.push(name),
        }
    }
    halves.sort_by(|a, b| a.0.cmp(&b.0));
    let mut pairs = Vec::new();
    let mut halves = halves.into_iter().peekable();
    while let Some(((layer, module, is_b), name, a)) = halves.next() {
        let other = halves.next_if(|(place, _, _)| !is_b && *place == (layer, module.clone(), true));
        let Some((_, _, b)) = other else {
            return Err(Error::input(format!(
                "{}: {name} stands without its other half; save the adapter again",
                path.display()
            )));
        };
        pairs.push(Pair { layer, module, scale: None, a, b });
    }
    Ok((pairs, others))
}

#[cfg(test)]
#[path = "foreign_tests.rs"]
mod tests;
