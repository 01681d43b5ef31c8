//! The backend of a `VarBuilder` that folds an adapter into the weights it hands out.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::{
    Init,
    var_builder::{Backend, Shard, SimpleBackend, VarBuilderArgs},
};

use super::{Adapter, fold::working_dtype};

/// Weights of a base with an adapter folded in; [`Adapter::over`] makes one.
pub struct Adapted<'a, B: Backend> {
    base: VarBuilderArgs<'a, B>,
    adapter: Adapter,
}

/// What a builder's hints say about the part of a weight that is asked for.
pub trait Slice: Default + Copy {
    /// The part, if it is not the whole weight.
    fn shard(&self) -> Option<Shard>;
}

impl Slice for Init {
    fn shard(&self) -> Option<Shard> {
        None
    }
}

impl Slice for Shard {
    fn shard(&self) -> Option<Shard> {
        (self.world_size > 1).then_some(*self)
    }
}

impl<'a, B: Backend> Adapted<'a, B> {
    pub(super) fn new(base: VarBuilderArgs<'a, B>, adapter: Adapter) -> Self {
        Self { base, adapter }
    }

    /// The name of a parameter from the root of the base.
    fn full(&self, name: &str) -> String {
        match self.base.prefix() {
            prefix if prefix.is_empty() => name.to_owned(),
            prefix => format!("{prefix}.{name}"),
        }
    }

    /// A parameter as `fetch` reads it from the base in a dtype, with the adapter's changes, in `dtype`.
    fn load(&self, name: &str, dtype: DType, fetch: impl Fn(DType) -> Result<Tensor>) -> Result<Tensor> {
        let name = self.full(name);
        let Some(found) = self.adapter.find(&name) else {
            let weight = fetch(dtype)?;
            self.adapter.check_absent(&name, &weight)?;
            return Ok(weight);
        };
        let working = working_dtype(dtype);
        let before = match (fetch(working), self.adapter.replaces(&found)) {
            (Ok(before), _) => before,
            // The base lacks it, or has another vocabulary.
            (Err(_), Some(value)) => value.to_device(self.base.device())?.to_dtype(working)?,
            (Err(error), None) => return Err(error),
        };
        self.adapter.apply(&name, &found, before)?.to_dtype(dtype)
    }

    fn contains(&self, name: &str) -> bool {
        let found = || self.adapter.find(&self.full(name));
        self.base.contains_tensor(name)
            || found().is_some_and(|found| self.adapter.replaces(&found).is_some())
    }
}

/// Refuses a parameter of another shape than the model wants.
fn shaped(tensor: Tensor, wanted: &Shape, name: &str) -> Result<Tensor> {
    if tensor.shape() == wanted {
        return Ok(tensor);
    }
    let msg = format!("shape mismatch for {name}, which an adapter replaces");
    Err(candle_core::Error::UnexpectedShape { msg, expected: wanted.clone(), got: tensor.shape().clone() })
}

impl<B: Backend> Backend for Adapted<'_, B>
where
    B::Hints: Slice,
{
    type Hints = B::Hints;

    fn get(&self, s: Shape, name: &str, hints: B::Hints, dtype: DType, dev: &Device) -> Result<Tensor> {
        let fetch =
            |hints, shape: &Shape, dtype| self.base.get_with_hints_dtype(shape.clone(), name, hints, dtype);
        let Some(Shard { dim, rank, world_size }) = hints.shard() else {
            let whole = self.load(name, dtype, |dtype| fetch(hints, &s, dtype))?;
            return shaped(whole, &s, name)?.to_device(dev);
        };
        let part = fetch(hints, &s, dtype)?;
        let full = self.full(name);
        if self.adapter.find(&full).is_none() {
            self.adapter.check_absent(&full, &part)?;
            return part.to_device(dev);
        }
        let mut dims = part.dims().to_vec();
        let block = dims[dim];
        dims[dim] *= world_size;
        let whole =
            self.load(name, dtype, |dtype| fetch(B::Hints::default(), &Shape::from(&dims[..]), dtype))?;
        whole.narrow(dim, rank * block, block)?.contiguous()?.to_device(dev)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.load(name, dtype, |dtype| self.base.get_unchecked_dtype(name, dtype))?.to_device(dev)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.contains(name)
    }
}

impl<'a> SimpleBackend for Adapted<'a, Box<dyn SimpleBackend + 'a>> {
    fn get(&self, s: Shape, name: &str, hints: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        Backend::get(self, s, name, hints, dtype, dev)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        Backend::get_unchecked(self, name, dtype, dev)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.contains(name)
    }
}
