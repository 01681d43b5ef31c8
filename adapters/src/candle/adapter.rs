//! An adapter that is folded into weights, and what of it was loaded.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::{Backend, VarBuilderArgs};

use super::{
    Adapted,
    changes::Changes,
    fold::{Change, Place},
    names::{Found, Loaded, find},
    source::{Source, open_all},
};
use crate::{Error, Problem, Result, peft::MODULE_PREFIX};

/// A `VarBuilder` over `base` whose weights have the PEFT adapter in `folder` folded in, and the adapter.
///
/// The model that is built from it asks for its weights in `dtype` and on `device`, as from any `VarBuilder`. When
/// it is built, [`Adapter::finish`] says whether it loaded the whole adapter. For a second adapter call this again
/// with the builder that came out.
///
/// # Errors
/// As [`Adapter::open`]. What shows while the model loads (a weight of another shape) is an error of that load.
pub fn with_adapter<'a>(
    base: VarBuilder<'a>,
    folder: impl AsRef<Path>,
    dtype: DType,
    device: &Device,
) -> Result<(VarBuilder<'a>, Adapter)> {
    let adapter = Adapter::open(folder)?;
    Ok((adapter.fold_into(base, dtype, device), adapter))
}

/// A PEFT adapter, read and ready to be folded into the weights of a base.
///
/// # Names
///
/// A model's parameters should be called as in Transformers: a builder at the root, or one with the prefix that
/// leads there (`vb.pp("transformer")`). If PEFT wrapped a larger or a smaller model than the one that loads, all
/// names differ by one prefix; that is noticed. Other names need [`Adapter::rename_f`].
///
/// # Sharded weights
///
/// [`Adapter::over`] takes any builder of candle's, also a `ShardedVarBuilder`: a shard of the folded weight comes
/// out. The whole weight is in memory meanwhile, because ranks and norms run across shards.
///
/// # Tied heads
///
/// A head that is tied to an embedding is the folded embedding, as in a model that PEFT has merged.
///
/// # Square weights
///
/// Whether a weight is (outputs, inputs) or (inputs, outputs) shows in its shape. For square weights the config's
/// `fan_in_fan_out` decides, as in PEFT.
#[derive(Clone)]
pub struct Adapter {
    state: Arc<State>,
    rename: Option<Rename>,
}

type Rename = Arc<dyn Fn(&str) -> String + Send + Sync>;

struct State {
    folder: PathBuf,
    sources: Vec<Source>,
    changes: Changes,
    loaded: Mutex<Loaded>,
}

impl Adapter {
    /// Reads the adapter in a folder, or the methods saved together in folders of their names below it.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NotAnAdapter`], [`Error::Json`], [`Error::SafeTensors`] for files that cannot be
    /// read, and [`Error::Mismatch`] with every reason for a method that does not fold into weights, or for a
    /// config and tensors that do not belong together.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let mut sources = open_all(folder)?;
        let mut changes = Changes::default();
        sources.iter_mut().try_for_each(|source| changes.add(source))?;
        let loaded = Mutex::new(Loaded::default());
        let state = Arc::new(State { folder: folder.to_owned(), sources, changes, loaded });
        Ok(Self { state, rename: None })
    }

    /// The adapter for a model with names of its own: `f` turns the name of a parameter in the model into its name
    /// in Transformers, such as `model.layers.0.self_attn.q_proj.weight`. No prefix is guessed then, and a module that
    /// the config adapts and the tensor file lacks is not noticed.
    #[must_use]
    pub fn rename_f<F: Fn(&str) -> String + Send + Sync + 'static>(self, f: F) -> Self {
        Self { rename: Some(Arc::new(f)), ..self }
    }

    /// A builder over `base` whose weights have the adapter folded in.
    pub fn fold_into<'a>(&self, base: VarBuilder<'a>, dtype: DType, device: &Device) -> VarBuilder<'a> {
        VarBuilder::from_backend(Box::new(self.over(base)), dtype, device.clone())
    }

    /// A backend for `VarBuilderArgs::new_with_args`, over a builder of any kind.
    pub fn over<'a, B: Backend>(&self, base: VarBuilderArgs<'a, B>) -> Adapted<'a, B> {
        Adapted::new(base, self.clone())
    }

    /// The adapter's parameters that no load has asked for, by their names in the adapter.
    pub fn unused(&self) -> Vec<String> {
        let loaded = self.loaded();
        let changes = &self.state.changes;
        let is_unused =
            |name: &&String| !loaded.names.contains_key(*name) && !changes.optional.contains(*name);
        changes.by_parameter.keys().filter(is_unused).cloned().collect()
    }

    /// Checks that the whole adapter was loaded.
    ///
    /// # Errors
    /// [`Error::NotLoaded`] with the parameters that no load has asked for.
    pub fn finish(&self) -> Result<()> {
        match self.unused() {
            unused if unused.is_empty() => Ok(()),
            parameters => Err(Error::NotLoaded { path: self.state.folder.clone(), parameters }),
        }
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.state.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The adapter's parameter that a model asks for as `asked`.
    pub(super) fn find(&self, asked: &str) -> Option<Found> {
        let parameters = &self.state.changes.by_parameter;
        match &self.rename {
            None => find(asked, parameters),
            Some(rename) => {
                let parameter = rename(asked);
                parameters.contains_key(&parameter).then_some(Found { parameter, shift: None })
            }
        }
    }

    /// Whether the adapter has the value of a parameter, so that the base need not have it.
    pub(super) fn replaces(&self, found: &Found) -> Option<&Tensor> {
        match self.state.changes.by_parameter.get(&found.parameter)?.first()? {
            Change::Replace(value) => self.loaded().is_sure(found).then_some(value),
            _ => None,
        }
    }

    /// The parameter with all changes; `before` is the base's.
    pub(super) fn apply(&self, asked: &str, found: &Found, before: Tensor) -> candle_core::Result<Tensor> {
        let at = Place { folder: &self.state.folder, parameter: &found.parameter };
        let changes = self.state.changes.by_parameter.get(&found.parameter);
        let mut changes = changes.into_iter().flatten();
        let after = changes.try_fold(before, |before, change| change.apply(at, &before))?;
        self.loaded().note(asked, found).map_err(candle_core::Error::wrap)?;
        Ok(after)
    }

    /// Refuses a module that the config adapts and the tensor file lacks. `weight` is what was loaded as `asked`.
    pub(super) fn check_absent(&self, asked: &str, weight: &Tensor) -> candle_core::Result<()> {
        if self.rename.is_some() {
            return Ok(()); // what the function leaves alone may be no part of the model that PEFT wrapped
        }
        let name = match &self.loaded().shift {
            Some(shift) => shift.undo(asked),
            None => Some(asked.to_owned()),
        };
        let module =
            name.as_deref().and_then(|name| name.strip_suffix(".weight")).filter(|_| weight.rank() > 1);
        let Some(module) = module else { return Ok(()) };
        let lacks = |source: &&Source| source.chooses(module) == Some(true);
        match self.state.sources.iter().find(lacks) {
            Some(source) => {
                let missing = Problem::Missing(format!("{MODULE_PREFIX}{module}.*"));
                let (path, problems) = (source.folder.clone(), vec![missing]);
                Err(candle_core::Error::wrap(Error::Mismatch { path, problems }))
            }
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter")
            .field("folder", &self.state.folder)
            .field("parameters", &self.state.changes.by_parameter.len())
            .finish_non_exhaustive()
    }
}
