//! Adapters folded into their base: a folder of a plain GPT-2, written one module at a time.

use std::{collections::HashMap, path::Path};

use engraft_adapters::{BaseDescription, Folding};
use engraft_util::atomic::{self, WriteError};

use super::folder::{
    Stop, WeightDtype, WeightFiles, changed_config, check_output, copy_companions, write_json,
};
use crate::{
    error::Result,
    model::{
        Base, SourceTensors,
        arch::{HEAD, TOKEN_EMBEDDING, Tensor},
        weights::OnBytes,
    },
};

/// What is folded into what, and how the result is written.
pub struct Merge<'a> {
    /// The base; its files are read anew, in their own precision.
    pub base: &'a Base,
    /// The adapters and their factors.
    pub folding: &'a Folding<'a>,
    /// Type of the weights that are written.
    pub dtype: WeightDtype,
    /// Most bytes of tensors in a file; a larger tensor has a file of its own.
    pub max_shard: u64,
}

/// A folder that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// Tensors of the model.
    pub tensors: usize,
    /// How many of them an adapter changed, or brought about.
    pub changed: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Names of the weight files.
    pub files: Vec<String>,
    /// Whether the head, which was the token embedding, has become a tensor of its own.
    pub untied: bool,
}

/// What a tensor of the base is to an adapter.
#[derive(Debug, Clone, Copy)]
enum Role {
    /// Weight of a site of a layer.
    Weight(usize, usize),
    /// Bias of a linear module.
    Bias,
    /// Gain of a layer norm; without a layer of the one before the head.
    Gain(Option<usize>, usize),
    /// Bias of a layer norm, numbered as its gain.
    NormBias(Option<usize>, usize),
    Embedding,
}

impl Merge<'_> {
    /// Writes the folder `output`, beside its place until it is complete. `on_bytes` hears how many bytes of tensors
    /// are done, and of how many.
    ///
    /// # Errors
    /// [`Input`](crate::error::Error::Input) as [`check_output`], for a base that cannot be read, and for a weight that
    /// the type cannot hold; [`Failed`](crate::error::Error::Failed) when the folder cannot be written. Nothing is
    /// left of it then.
    pub fn write(&self, output: &Path, on_bytes: OnBytes) -> Result<Merged> {
        check_output(output)?;
        let source = self.base.source_tensors()?;
        let untied = self.base.config.tied && self.folding.changes_embedding();
        let config = changed_config(&self.base.config_text()?, self.dtype, untied)?;
        let tensors = tensors(&source, untied);
        let files = WeightFiles::new(tensors.clone(), self.dtype, self.max_shard);
        let mut values = Values::new(self.base, self.folding, &source, untied);
        let (mut done, total) = (0, files.bytes());
        let mut next = |tensor: &Tensor| {
            let values = values.of(tensor)?;
            done += (values.len() * self.dtype.bytes()) as u64;
            on_bytes(done, total);
            Ok(values)
        };
        let mut stopped = None;
        let written = atomic::replace_folder(output, &[], |fresh| {
            let mut fill = || {
                files.write(fresh, &mut next)?;
                copy_companions(self.base, fresh)?;
                write_json(&fresh.join("config.json"), &config)
            };
            fill().map_err(|stop| match stop {
                Stop::Write(error) => error,
                Stop::Other(error) => {
                    stopped = Some(error);
                    WriteError::new(fresh, std::io::Error::other("there is nothing to write"))
                }
            })
        });
        written.map_err(|error| stopped.unwrap_or_else(|| error.into()))?;
        let (tensors, changed) = (tensors.len(), values.changed);
        Ok(Merged { tensors, changed, bytes: files.bytes(), files: files.names(), untied })
    }
}

/// The tensors of the merged model in canonical order; an `untied` one has a head of its own.
pub(super) fn tensors(source: &SourceTensors, untied: bool) -> Vec<Tensor> {
    let mut tensors = source.tensors().to_vec();
    if untied {
        let embedding = tensors.iter().find(|tensor| tensor.name == TOKEN_EMBEDDING);
        let head = embedding.map(|tensor| Tensor { name: HEAD.to_owned(), shape: tensor.shape.clone() });
        tensors.extend(head);
    }
    tensors
}

/// Hands out the values of the merged model, tensor by tensor in canonical order.
pub(super) struct Values<'a> {
    folding: &'a Folding<'a>,
    source: &'a SourceTensors,
    roles: HashMap<String, Role>,
    /// The folded bias of the weight that was handed out last.
    bias: Option<Vec<f32>>,
    untied: bool,
    pub(super) changed: usize,
}

impl<'a> Values<'a> {
    pub(super) fn new(
        base: &Base,
        folding: &'a Folding<'a>,
        source: &'a SourceTensors,
        untied: bool,
    ) -> Self {
        let roles = roles(&base.description());
        Self { folding, source, roles, bias: None, untied, changed: 0 }
    }

    pub(super) fn of(&mut self, tensor: &Tensor) -> Result<Vec<f32>> {
        if tensor.name == HEAD && self.untied {
            self.changed += 1;
            return self.source.read(TOKEN_EMBEDDING);
        }
        match self.roles.get(&tensor.name).copied() {
            Some(Role::Weight(layer, site)) if self.folding.changes_linear(layer, site) => {
                let mut weight = self.source.read(&tensor.name)?;
                let bias = tensor.name.strip_suffix(WEIGHT).map(|module| format!("{module}{BIAS}"));
                let before = self.source.read(&bias.unwrap_or_default())?;
                let mut bias = before.clone();
                self.folding.linear(layer, site, &mut weight, &mut bias);
                self.changed += 1 + usize::from(bias != before);
                self.bias = Some(bias);
                Ok(weight)
            }
            Some(Role::Bias) => match self.bias.take() {
                Some(folded) => Ok(folded),
                None => self.source.read(&tensor.name),
            },
            Some(Role::Gain(layer, norm)) => self.replaced(tensor, self.folding.norm(layer, norm).0),
            Some(Role::NormBias(layer, norm)) => self.replaced(tensor, self.folding.norm(layer, norm).1),
            Some(Role::Embedding) if self.folding.changes_embedding() => {
                let mut table = self.source.read(&tensor.name)?;
                self.folding.embedding(&mut table);
                self.changed += 1;
                Ok(table)
            }
            _ => self.source.read(&tensor.name),
        }
    }

    fn replaced(&mut self, tensor: &Tensor, new: Option<&[f32]>) -> Result<Vec<f32>> {
        match new {
            Some(new) => {
                self.changed += 1;
                Ok(new.to_vec())
            }
            None => self.source.read(&tensor.name),
        }
    }
}

const WEIGHT: &str = ".weight";
const BIAS: &str = ".bias";

/// Which tensors of a base adapters can change.
fn roles(base: &BaseDescription) -> HashMap<String, Role> {
    let mut roles = HashMap::from([(TOKEN_EMBEDDING.to_owned(), Role::Embedding)]);
    for layer in 0..base.layers {
        for (index, site) in base.sites.iter().enumerate() {
            let module = site.module(layer);
            roles.insert(format!("{module}{WEIGHT}"), Role::Weight(layer, index));
            roles.insert(format!("{module}{BIAS}"), Role::Bias);
        }
    }
    let (inside, last): (Vec<_>, Vec<_>) = base.norms.iter().partition(|norm| norm.is_in_layers());
    let each = |norms: Vec<_>, layer: Option<usize>, roles: &mut HashMap<String, Role>| {
        for (index, norm) in norms.into_iter().enumerate() {
            let norm: &engraft_adapters::NormDescription = norm;
            let module = norm.module(layer.unwrap_or_default());
            roles.insert(format!("{module}{WEIGHT}"), Role::Gain(layer, index));
            roles.insert(format!("{module}{BIAS}"), Role::NormBias(layer, index));
        }
    };
    (0..base.layers).for_each(|layer| each(inside.clone(), Some(layer), &mut roles));
    each(last, None, &mut roles);
    roles
}
