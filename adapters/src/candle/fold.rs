//! What an adapter does to one parameter, and its maths in candle tensors.

use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor};

use crate::{Error, Problem};

/// Keeps a norm of 0 from dividing; the weights below it are 0 in any case.
const SMALLEST_NORM: f64 = 1e-30;

/// A change of one parameter.
#[derive(Debug)]
pub(super) enum Change {
    /// The adapter's own value takes the place of the base's.
    Replace(Tensor),
    /// A low-rank delta on a weight.
    LowRank(LowRank),
    /// Factors (n) of a weight's outputs or inputs.
    Scale { factors: Tensor, side: Side, fan_in_fan_out: bool },
    /// Factors of the shape of the parameter.
    Multiply(Tensor),
    /// Added to the parameter.
    Add(Tensor),
}

/// `W + s B A` and, with a magnitude m, `m (W + s B A) / |W + s B A|` with norms over the inputs of each output
/// (DoRA: Liu et al. 2024, arXiv:2402.09353, section 4.1). For W (outputs, inputs).
#[derive(Debug)]
pub(super) struct LowRank {
    /// (rank, inputs).
    pub a: Tensor,
    /// (outputs, rank).
    pub b: Tensor,
    pub scale: f64,
    /// (outputs).
    pub magnitude: Option<Tensor>,
    pub stored: Stored,
}

/// How the base stores a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// (outputs, inputs), or (inputs, outputs) if only that fits.
    OutputsFirst,
    /// (inputs, outputs), or (outputs, inputs) if only that fits.
    InputsFirst,
    /// (rows, width) of an embedding, whose inputs are its rows.
    Embedding,
}

/// The side of a weight that factors act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Outputs,
    Inputs,
}

/// A parameter and the adapter that changes it, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub folder: &'a Path,
    pub parameter: &'a str,
}

/// The dtype in which a weight of dtype `dtype` is summed up.
pub(super) fn working_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

impl Place<'_> {
    fn mismatch(self, found: &[usize], expected: &[usize]) -> candle_core::Error {
        let (found, expected) = (found.to_vec(), expected.to_vec());
        let problem = Problem::Shape { tensor: self.parameter.to_owned(), found, expected };
        candle_core::Error::wrap(Error::Mismatch { path: self.folder.to_owned(), problems: vec![problem] })
    }
}

impl Stored {
    pub fn of_linear(fan_in_fan_out: bool) -> Self {
        if fan_in_fan_out { Self::InputsFirst } else { Self::OutputsFirst }
    }

    /// Whether a weight of these sizes is (inputs, outputs); nothing when it fits neither way.
    fn is_inputs_first(self, dims: &[usize], outputs: Option<usize>, inputs: Option<usize>) -> Option<bool> {
        let &[first, second] = dims else { return None };
        let fits = |own: Option<usize>, size: usize| own.is_none_or(|own| own == size);
        let outputs_first = fits(outputs, first) && fits(inputs, second);
        let inputs_first = fits(inputs, first) && fits(outputs, second);
        match (self, outputs_first, inputs_first) {
            (Self::Embedding, _, fits) => fits.then_some(true),
            (_, true, true) => Some(self == Self::InputsFirst),
            (_, true, false) => Some(false),
            (_, false, true) => Some(true),
            (_, false, false) => None,
        }
    }
}

impl Change {
    /// The parameter after the change; `before` is the base's, in the dtype and on the device of the result.
    pub fn apply(&self, at: Place, before: &Tensor) -> Result<Tensor> {
        let (dtype, device) = (before.dtype(), before.device());
        match self {
            Self::Replace(value) => moved(value, dtype, device),
            Self::LowRank(delta) => delta.apply(at, before),
            Self::Add(summand) => before + same_shape(at, summand, before)?,
            Self::Multiply(factors) => before * same_shape(at, factors, before)?,
            Self::Scale { factors, side, fan_in_fan_out } => {
                let n = factors.elem_count();
                let stored = Stored::of_linear(*fan_in_fan_out);
                let first = match side {
                    Side::Outputs => stored.is_inputs_first(before.dims(), Some(n), None),
                    Side::Inputs => stored.is_inputs_first(before.dims(), None, Some(n)),
                };
                let inputs_first = first.ok_or_else(|| at.mismatch(&[n], before.dims()))?;
                let columns = inputs_first == (*side == Side::Outputs);
                let shape = if columns { (1, n) } else { (n, 1) };
                before.broadcast_mul(&moved(factors, dtype, device)?.reshape(shape)?)
            }
        }
    }
}

impl LowRank {
    fn apply(&self, at: Place, before: &Tensor) -> Result<Tensor> {
        let (outputs, inputs) = (self.b.dim(0)?, self.a.dim(1)?);
        let inputs_first = self.stored.is_inputs_first(before.dims(), Some(outputs), Some(inputs));
        let inputs_first = inputs_first.ok_or_else(|| at.mismatch(&[outputs, inputs], before.dims()))?;
        let (dtype, device) = (before.dtype(), before.device());
        let [a, b] = [&self.a, &self.b].map(|factor| moved(factor, dtype, device));
        let delta = (b?.matmul(&a?)? * self.scale)?; // (outputs, inputs)
        let weight = if inputs_first { before.t()? } else { before.clone() };
        let mut sum = (weight + delta)?;
        if let Some(magnitude) = &self.magnitude {
            let norms = sum.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(SMALLEST_NORM)?; // (outputs, 1)
            let factors = (moved(magnitude, dtype, device)?.reshape((outputs, 1))? / norms)?;
            sum = sum.broadcast_mul(&factors)?;
        }
        if inputs_first { sum.t()?.contiguous() } else { Ok(sum) }
    }
}

fn moved(tensor: &Tensor, dtype: DType, device: &Device) -> Result<Tensor> {
    tensor.to_device(device)?.to_dtype(dtype)
}

fn same_shape(at: Place, own: &Tensor, before: &Tensor) -> Result<Tensor> {
    if own.dims() != before.dims() {
        return Err(at.mismatch(own.dims(), before.dims()));
    }
    moved(own, before.dtype(), before.device())
}
