//! A frozen linear layer with a trainable LoRA, for candle's autograd.

use candle_core::{Module, ModuleT, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder, ops};

use super::fold::working_dtype;
use crate::{Error, LoraSpec, methods::lora::check_values};

/// `y = x W^T + b + s (dropout(x) A^T) B^T`: a frozen linear layer and a LoRA beside it.
///
/// A (rank, inputs) and B (outputs, rank) come from a `VarBuilder`. Over a `VarMap` they are variables that candle's
/// optimizers take: `AdamW::new(varmap.all_vars(), ..)`. W and b are detached, so they get no gradient even if they
/// are variables of another map.
///
/// ```
/// use candle_core::{DType, Device, ModuleT, Tensor};
/// use candle_nn::{Linear, VarBuilder, VarMap};
/// use engraft_adapters::{LoraSpec, candle::LoraLinear};
///
/// let varmap = VarMap::new();
/// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let base = Linear::new(Tensor::ones((6, 4), DType::F32, &Device::Cpu)?, None);
/// let spec = LoraSpec { rank: 2, alpha: 4.0, dropout: 0.1, ..LoraSpec::default() };
/// let layer = LoraLinear::new(base, &spec, vb.pp("model.layers.0.mlp.up_proj"))?;
///
/// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
/// let y = layer.forward_t(&x, true)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[4.0; 6]; 3]); // B starts at zero: still the base
/// let gradients = y.sum_all()?.backward()?;
/// assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It is a [`ModuleT`] because of the dropout. candle makes a `ModuleT` that ignores the flag out of every
/// [`Module`], so no type can be both; [`LoraLinear::without_dropout`] is the same layer as a [`Module`].
#[derive(Debug, Clone)]
pub struct LoraLinear {
    path: String,
    base: Linear,
    /// A as a layer: weight (rank, inputs).
    down: Linear,
    /// B as a layer: weight (outputs, rank).
    up: Linear,
    alpha: f64,
    scale: f64,
    rslora: bool,
    dropout: f64,
}

/// A [`LoraLinear`] that drops nothing.
#[derive(Debug, Clone, Copy)]
pub struct WithoutDropout<'a>(&'a LoraLinear);

impl LoraLinear {
    /// A LoRA beside `base`, which is frozen.
    ///
    /// The path of `vb` is the path of the module: it stands before the names of the variables
    /// (`PATH.lora_A.weight`, `PATH.lora_B.weight`), in PEFT's files, and chooses among the spec's patterns of ranks
    /// and alphas. Where `vb` has no such tensors yet, A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)) and B = 0, as in PEFT.
    /// They have the dtype of `vb`, which need not be that of `base`. The spec's `targets` and `layers` are not
    /// looked at: they choose where you put such a layer.
    ///
    /// # Errors
    /// A rank of 0, an alpha that is not finite, a dropout outside [0, 1), or tensors of other shapes in `vb`.
    pub fn new(base: Linear, spec: &LoraSpec, vb: VarBuilder) -> Result<Self> {
        let path = vb.prefix();
        check_values(spec).map_err(candle_core::Error::wrap)?;
        let (rank, alpha) = spec.rank_and_alpha(&path).map_err(candle_core::Error::wrap)?;
        let (outputs, inputs) = base.weight().dims2()?;
        let bound = 1.0 / (inputs as f64).sqrt();
        let uniform = Init::Uniform { lo: -bound, up: bound };
        let a = vb.get_with_hints((rank, inputs), "lora_A.weight", uniform)?;
        let b = vb.get_with_hints((outputs, rank), "lora_B.weight", Init::Const(0.0))?;
        Ok(Self {
            path,
            base: Linear::new(base.weight().detach(), base.bias().map(Tensor::detach)),
            down: Linear::new(a, None),
            up: Linear::new(b, None),
            alpha,
            scale: spec.scale(rank, alpha),
            rslora: spec.rslora,
            dropout: spec.dropout,
        })
    }

    /// Path of the module, such as `model.layers.0.mlp.up_proj`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The frozen layer.
    pub fn base(&self) -> &Linear {
        &self.base
    }

    /// A, (rank, inputs).
    pub fn a(&self) -> &Tensor {
        self.down.weight()
    }

    /// B, (outputs, rank).
    pub fn b(&self) -> &Tensor {
        self.up.weight()
    }

    /// The factor s of the delta.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    pub(super) fn rank(&self) -> usize {
        self.a().dims().first().copied().unwrap_or_default()
    }

    pub(super) fn alpha(&self) -> f64 {
        self.alpha
    }

    pub(super) fn rslora(&self) -> bool {
        self.rslora
    }

    pub(super) fn dropout(&self) -> f64 {
        self.dropout
    }

    /// `x W^T + b + s (x A^T) B^T`, without dropout.
    ///
    /// # Errors
    /// An x whose last dimension is not the layer's number of inputs.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.compute(x, false)
    }

    /// This layer as a [`Module`] that drops nothing.
    pub fn without_dropout(&self) -> WithoutDropout<'_> {
        WithoutDropout(self)
    }

    /// A plain layer with the LoRA folded in: `W + s B A`, summed in F32 (F64 for an F64 layer) and rounded once.
    ///
    /// The layer itself stays as it is.
    ///
    /// # Errors
    /// When candle fails, for example out of memory.
    pub fn merge(&self) -> Result<Linear> {
        let weight = self.base.weight();
        let working = working_dtype(weight.dtype());
        let [a, b] = [self.a(), self.b()].map(|factor| factor.detach().to_dtype(working));
        let delta = (b?.matmul(&a?)? * self.scale)?;
        let merged = (weight.to_dtype(working)? + delta)?.to_dtype(weight.dtype())?;
        Ok(Linear::new(merged, self.base.bias().cloned()))
    }

    fn compute(&self, x: &Tensor, drops: bool) -> Result<Tensor> {
        let y = self.base.forward(x)?;
        let x = x.to_dtype(self.a().dtype())?;
        let x = if drops && self.dropout > 0.0 { ops::dropout(&x, self.dropout as f32)? } else { x };
        let delta = (self.up.forward(&self.down.forward(&x)?)? * self.scale)?;
        y + delta.to_dtype(self.base.weight().dtype())?
    }

    /// The error that says why this layer cannot be saved.
    pub(super) fn refuse(&self, cause: &str) -> Error {
        Error::Layers { cause: format!("{} {cause}", self.path) }
    }
}

impl ModuleT for LoraLinear {
    /// With dropout on the LoRA's input if `drops`, the flag that candle calls `train`.
    fn forward_t(&self, x: &Tensor, drops: bool) -> Result<Tensor> {
        self.compute(x, drops)
    }
}

impl Module for WithoutDropout<'_> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}
