//! Prefix tuning: learned keys and values in front of every sequence (Li and Liang 2021, arXiv:2101.00190).
//!
//! Initial values: N(0, 1) for what PEFT's `PrefixEncoder` holds as `torch.nn.Embedding`; weight and bias of the
//! two linear layers of a projection U(-1/sqrt(inputs), 1/sqrt(inputs)), as `torch.nn.Linear`.

use candle_core::{D, IndexOp, Tensor};
use engraft_util::words::count_of;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Prefix, PrefixValues, Result,
    init::Init,
    layout::Slots,
    peft::{
        self, Fields, Files, Findings, Outgoing, TensorFile,
        virtual_tokens::{TENSOR, VirtualTokens},
    },
    set::layer_ranges,
};

/// A prefix: `length` learned keys and values per layer (Li and Liang 2021, arXiv:2101.00190).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefixSpec {
    /// Length P in virtual tokens.
    pub length: usize,
    /// Hidden width of the two-layer network that makes the prefix; `None` learns it directly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub projection: Option<usize>,
}

impl Default for PrefixSpec {
    fn default() -> Self {
        Self { length: 20, projection: None }
    }
}

impl PrefixSpec {
    /// The kind `prefix`.
    pub const KIND: Kind =
        Kind { name: "prefix", peft_type: "PREFIX_TUNING", claims: |_| true, read: StoredPrefix::read };
}

impl Method for PrefixSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let length = self.length;
        if length == 0 || length >= base.positions {
            return Err(Error::PrefixLength { length, positions: base.positions });
        }
        let (d, out) = (base.width, 2 * base.layers * base.width);
        let values = match self.projection {
            None => PrefixValues::Direct { values: slots.push(TENSOR, &[length, out])? },
            Some(0) => return Err(Error::ZeroProjection),
            Some(hidden) => PrefixValues::Projected {
                hidden,
                embedding: slots.push("prompt_encoder.embedding.weight", &[length, d])?,
                in_weight: slots.push("prompt_encoder.transform.0.weight", &[hidden, d])?,
                in_bias: slots.push("prompt_encoder.transform.0.bias", &[hidden])?,
                out_weight: slots.push("prompt_encoder.transform.2.weight", &[out, hidden])?,
                out_bias: slots.push("prompt_encoder.transform.2.bias", &[out])?,
            },
        };
        Ok(Contribution { prefix: Some(Prefix { length, values }), ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        let slots = &set.layout.tensors;
        match set.prefix.as_ref().map(|prefix| &prefix.values) {
            None => {}
            Some(&PrefixValues::Direct { values: tensor }) => from.normal(values, &slots[tensor]),
            Some(&PrefixValues::Projected {
                hidden,
                embedding,
                in_weight,
                in_bias,
                out_weight,
                out_bias,
            }) => {
                let width = slots[embedding].shape[1];
                from.normal(values, &slots[embedding]);
                from.uniform(values, &slots[in_weight], width);
                from.uniform(values, &slots[in_bias], width);
                from.uniform(values, &slots[out_weight], hidden);
                from.uniform(values, &slots[out_bias], hidden);
            }
        }
        Ok(())
    }

    fn matched(&self, _: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        let layers: Vec<_> = (0..base.layers).collect();
        vec![format!("prefix of {} virtual tokens: {}", self.length, layer_ranges(&layers))]
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("kind", format!("prefix, {}", count_of(self.length, "virtual token")))]
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        derived: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let width = 2 * base.layers * base.width;
        let prefix = match set.prefix.as_ref().map(|prefix| &prefix.values) {
            Some(&PrefixValues::Direct { values: tensor }) => &values[set.layout.tensors[tensor].range()],
            _ => derived.unwrap_or_default(),
        };
        peft::check_count("the projected prefix", prefix, self.length * width)?;
        peft::check_finite(TENSOR, prefix)?;
        let own = [
            ("encoder_hidden_size", json!(self.projection)),
            ("prefix_projection", json!(self.projection.is_some())),
        ];
        let fields = own.into_iter().chain(VirtualTokens::fields(self.length, base));
        let config = peft::config_text(&Self::KIND, base, fields);
        let shape = vec![self.length, width];
        let tensor = Outgoing { name: TENSOR.to_owned(), shape, values: Box::new(move || prefix.into()) };
        Ok(Files::new(config, vec![tensor], base))
    }

    fn read(
        &self,
        _: &AdapterSet,
        _: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        if let Some(prompt) = findings.read_finite(tensors, TENSOR)? {
            values.copy_from_slice(&prompt);
        }
        Ok(())
    }
}

/// A prefix as its config has it.
#[derive(Debug)]
struct StoredPrefix {
    tokens: VirtualTokens,
    projection: bool,
}

impl StoredPrefix {
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        let tokens = VirtualTokens::take(fields);
        let projection = fields.take("prefix_projection", "true or false is expected").unwrap_or_default();
        Some(Box::new(Self { tokens: tokens?, projection }))
    }
}

impl Stored for StoredPrefix {
    fn kind(&self) -> &'static Kind {
        &PrefixSpec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        PrefixSpec { length: self.tokens.length, projection: None }.into()
    }

    fn hint(&self) -> Option<&'static str> {
        let text =
            "the prefix was made by a projection, which the files do not hold; the prefix itself is read";
        self.projection.then_some(text)
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        self.tokens.check(2 * base.layers * base.width, tensors, base, findings);
        findings.accept(AdapterSet::new(&self.spec(tensors), base))
    }
}

/// The prefix that a projection makes: `tanh(E U^T + u) V^T + v`, [P, 2Ld].
///
/// E `[P, d]`, U `[hidden, d]`, u `[hidden]`, V `[2Ld, hidden]`, v `[2Ld]`.
///
/// # Errors
/// Shapes that do not belong together.
pub fn project_prefix(
    embedding: &Tensor,
    in_weight: &Tensor,
    in_bias: &Tensor,
    out_weight: &Tensor,
    out_bias: &Tensor,
) -> candle_core::Result<Tensor> {
    let hidden = embedding.matmul(&in_weight.t()?)?.broadcast_add(in_bias)?.tanh()?;
    hidden.matmul(&out_weight.t()?)?.broadcast_add(out_bias)
}

/// Keys and values of one layer, each [heads, P, d / heads], out of a prefix [P, 2Ld].
///
/// # Errors
/// A prefix whose width is not 2 `layers` d, or d that `heads` does not divide.
pub fn prefix_of_layer(
    prefix: &Tensor,
    layer: usize,
    layers: usize,
    heads: usize,
) -> candle_core::Result<(Tensor, Tensor)> {
    let (length, width) = prefix.dims2()?;
    let view = prefix.reshape((length, 2 * layers, heads, width / (2 * layers * heads)))?;
    let of = |index: usize| view.i((.., index))?.transpose(0, 1)?.contiguous();
    Ok((of(2 * layer)?, of(2 * layer + 1)?))
}

/// Causal attention after a prefix: `softmax(q [K_p; k]^T scale) [V_p; v]`.
///
/// q, k, v [b, heads, t, head width]; the prefix's keys and values [heads, P, head width]. Every token
/// sees the whole prefix, and the tokens up to itself.
///
/// # Errors
/// Shapes that do not belong together.
pub fn prefix_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    prefix: Option<(&Tensor, &Tensor)>,
    scale: f64,
) -> candle_core::Result<Tensor> {
    let (batch, heads, t, width) = q.dims4()?;
    let join = |own: &Tensor, prefix: &Tensor| {
        let shape = (batch, heads, prefix.dim(1)?, width);
        Tensor::cat(&[&prefix.unsqueeze(0)?.broadcast_as(shape)?.contiguous()?, own], 2)
    };
    let (keys, values, p) = match prefix {
        Some((prefix_k, prefix_v)) => (join(k, prefix_k)?, join(v, prefix_v)?, prefix_k.dim(1)?),
        None => (k.clone(), v.clone(), 0),
    };
    let scores = (q.matmul(&keys.t()?.contiguous()?)? * scale)?; // (b, h, t, p + t)
    let sees: Vec<u8> = (0..t).flat_map(|i| (0..p + t).map(move |j| u8::from(j <= p + i))).collect();
    let sees = Tensor::from_vec(sees, (t, p + t), q.device())?.broadcast_as(scores.shape())?;
    let hidden = Tensor::new(f64::NEG_INFINITY, q.device())?.to_dtype(q.dtype())?;
    softmax(&sees.where_cond(&scores, &hidden.broadcast_as(scores.shape())?)?)?.matmul(&values)
}

/// Softmax over the last dimension, with a backward (candle's fused one has none).
fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}
