//! The whole model once more in candle's differentiable tensor ops, in f64, and its autograd against ours.
//!
//! Ops that candle applies without a backward (its fused layer norm and softmax) are not used, so every
//! variable gets its gradient; a variable without one fails the test.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use engraft::{
    data::{NO_LOSS, Row},
    device::{Frozen, arena::Arenas},
    engine::{Trainer, TrainerOptions},
    kernels::matmul::FrozenMatrix,
    model::{Activation, Base, BaseDType, BlockWeights, Linear, Norm, Policy, Recompute},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::{Lora, PrefixValues};
use engraft_util::rng;
use half::f16;

use crate::setup::{
    Case, Sizes, batch, case, difference, golden, lora, pack, prefix, random_base, row, with_prompt, within,
};

/// Bounds of docs/NUMERICS.md: what FP32 costs against f64, relative to a tensor's largest element.
const GRADIENT: f64 = 2e-5;
const LOSS: f64 = 1e-6;

/// Rows of t = 7, fewer where the row says so, after a prefix of p = 5; r = 3.
const SEQ_LEN: usize = 7;

struct Twin<'a> {
    base: &'a Base,
    case: &'a Case,
    /// By index into the layout.
    vars: Vec<Var>,
    smoothing: f64,
    seed: u64,
    /// Length that elements are numbered with for dropout.
    seq_len: usize,
}

fn constant(values: Vec<f64>, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu)
}

fn frozen(tensor: &Frozen, shape: &[usize]) -> Result<Tensor> {
    constant(tensor.view().host::<f16>().iter().map(|half| half.to_f64()).collect(), shape)
}

/// The values of a matrix of any type; FP32 holds each of them exactly.
fn matrix(matrix: &FrozenMatrix) -> Result<Tensor> {
    let values = matrix.view().to_floats();
    constant(values.into_iter().map(f64::from).collect(), &[matrix.rows, matrix.cols])
}

impl<'a> Twin<'a> {
    fn new(base: &'a Base, case: &'a Case, options: TrainerOptions) -> Result<Self> {
        let vars = case
            .set
            .layout
            .tensors
            .iter()
            .map(|slot| {
                let values = case.values[slot.range()].iter().map(|&value| f64::from(value)).collect();
                Var::from_tensor(&constant(values, &slot.shape)?)
            })
            .collect::<Result<_>>()?;
        let TrainerOptions { label_smoothing, seed, seq_len, .. } = options;
        Ok(Self { base, case, vars, smoothing: label_smoothing, seed, seq_len })
    }

    /// Sum of the losses of all rows.
    fn loss(&self, rows: &[Row]) -> Result<Tensor> {
        let prefix = self.prefix()?;
        let mut sum = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        for (index, row) in rows.iter().enumerate() {
            sum = (sum + self.row_loss(index, row, prefix.as_ref())?)?;
        }
        Ok(sum)
    }

    /// What a method adds to the mean loss.
    fn penalty(&self) -> Result<Tensor> {
        let mut sum = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        let Some(rule) = &self.case.set.allocation else { return Ok(sum) };
        for own in &rule.triplets {
            for p in [self.vars[own.a].as_tensor().clone(), self.vars[own.b].t()?.contiguous()?] {
                let gram =
                    (p.matmul(&p.t()?.contiguous()?)? - Tensor::eye(p.dim(0)?, DType::F64, &Device::Cpu)?)?;
                sum = (sum + gram.sqr()?.sum_all()?.sqrt()?)?;
            }
        }
        sum * (rule.penalty / (2 * rule.modules) as f64)
    }

    fn row_loss(&self, index: usize, row: &Row, prefix: Option<&Tensor>) -> Result<Tensor> {
        let (config, weights) = (&self.base.config, &self.base.weights);
        let c = config.width;
        let shift = prefix.map_or(Ok(0), |prefix| prefix.dim(0))? as u32;
        let positions: Vec<u32> =
            (0u32..).zip(&row.starts).map(|(index, start)| index - start + shift).collect();
        let pick = |table: Tensor, ids: &[u32]| table.index_select(&Tensor::new(ids, &Device::Cpu)?, 0);
        let wpe = frozen(&weights.wpe, &[config.positions, c])?;
        let mut wte = matrix(&weights.wte)?;
        if let Some(delta) = &self.case.set.embedding {
            let added = self.vars[delta.a].t()?.matmul(&self.vars[delta.b].t()?)?;
            wte = (wte + (added * f64::from(delta.scale))?)?;
        }
        if let Some(prompt) = &self.case.set.prompt {
            wte = Tensor::cat(&[&wte, self.vars[prompt.embeddings].as_tensor()], 0)?;
        }
        let mut x = (pick(wte, &row.ids)? + pick(wpe, &positions)?)?;
        for layer in 0..config.layers {
            x = self.block(x, layer, index, row, prefix)?;
        }
        let hidden = self.norm(&x, &weights.ln_f, (None, 0))?;
        let head = matrix(weights.head.as_ref().unwrap_or(&weights.wte))?;
        self.cross_entropy(&hidden.matmul(&head.t()?)?, &row.targets)
    }

    /// `(1 - e) (lse(z) - z_y) + e (lse(z) - mean(z))` over the supervised rows of `z (t, v)`.
    fn cross_entropy(&self, z: &Tensor, targets: &[i32]) -> Result<Tensor> {
        let places: Vec<u32> =
            (0u32..).zip(targets).filter(|(_, y)| **y != NO_LOSS).map(|(place, _)| place).collect();
        let wanted: Vec<u32> = targets.iter().filter(|&&y| y != NO_LOSS).map(|&y| y as u32).collect();
        let wanted = Tensor::new(wanted, &Device::Cpu)?.unsqueeze(1)?;
        let z = z.index_select(&Tensor::new(places, &Device::Cpu)?, 0)?;
        let lse = z.exp()?.sum_keepdim(1)?.log()?;
        let hit = ((&lse - z.gather(&wanted, 1)?)? * (1.0 - self.smoothing))?;
        let spread = ((&lse - z.mean_keepdim(1)?)? * self.smoothing)?;
        (hit + spread)?.sum_all()
    }

    fn block(
        &self,
        x: Tensor,
        layer: usize,
        index: usize,
        row: &Row,
        prefix: Option<&Tensor>,
    ) -> Result<Tensor> {
        let BlockWeights { ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj } = &self.base.weights.blocks[layer];
        let linear = |x: &Tensor, site: usize, linear: &Linear| self.linear(x, (layer, site), linear, index);
        let qkv = linear(&self.norm(&x, ln_1, (Some(layer), 0))?, 0, c_attn)?;
        let mixed = self.attention(&qkv, layer, row, prefix)?;
        let x = (x + linear(&mixed, 1, attn_proj)?)?;
        let inner = self.activation(&linear(&self.norm(&x, ln_2, (Some(layer), 1))?, 2, c_fc)?)?;
        &x + linear(&inner, 3, mlp_proj)?
    }

    fn norm(&self, x: &Tensor, norm: &Norm, place: (Option<usize>, usize)) -> Result<Tensor> {
        let c = self.base.config.width;
        let vectors = self.case.set.norms.iter().find(|vectors| (vectors.layer, vectors.norm) == place);
        let or = |vector: Option<usize>, own: &Frozen| match vector {
            Some(vector) => Ok(self.vars[vector].as_tensor().clone()),
            None => frozen(own, &[c]),
        };
        let gain = or(vectors.and_then(|vectors| vectors.gain), &norm.gain)?;
        let bias = or(vectors.and_then(|vectors| vectors.bias), &norm.bias)?;
        let centred = x.broadcast_sub(&x.mean_keepdim(1)?)?;
        let variance = centred.sqr()?.mean_keepdim(1)?;
        let rstd = (variance + f64::from(self.base.config.layer_norm_eps))?.sqrt()?;
        centred.broadcast_div(&rstd)?.broadcast_mul(&gain)?.broadcast_add(&bias)
    }

    fn linear(&self, x: &Tensor, place: (usize, usize), linear: &Linear, index: usize) -> Result<Tensor> {
        let (weight, outputs) = (matrix(&linear.weight)?, linear.weight.cols);
        // Vectors may be stored as matrices of one row or column.
        let var = |tensor: usize| self.vars[tensor].flatten_all();
        let vectors = self.case.set.vectors.iter().find(|vectors| (vectors.layer, vectors.site) == place);
        let (u, g) = (vectors.and_then(|vectors| vectors.u), vectors.and_then(|vectors| vectors.g));
        let bias = match vectors.and_then(|vectors| vectors.bias) {
            Some(bias) => var(bias)?,
            None => frozen(&linear.bias, &[outputs])?,
        };
        let inside = g.is_some_and(|g| g.with_bias);
        let mut y = u.map_or(Ok(x.clone()), |u| x.broadcast_mul(&var(u)?))?.matmul(&weight)?;
        if inside {
            y = y.broadcast_add(&bias)?;
        }
        for lora in self.case.set.loras.iter().filter(|lora| (lora.layer, lora.site) == place) {
            let low = self.drop(x, lora, index)?.matmul(&self.vars[lora.a].t()?)?;
            let low = lora.d.map_or(Ok(low.clone()), |d| low.broadcast_mul(&var(d)?))?;
            let b = self.vars[lora.b].narrow(0, 0, lora.columns.len())?;
            let delta = (low.matmul(&b.t()?)? * f64::from(lora.scale))?;
            let delta = lora.e.map_or(Ok(delta.clone()), |e| delta.broadcast_mul(&var(e)?))?;
            let behind = outputs - lora.columns.end;
            y = (y + delta.pad_with_zeros(1, lora.columns.start, behind)?)?;
        }
        if let Some(g) = g {
            y = y.broadcast_mul(&match g.over_norms {
                true => (var(g.vector)? / self.norms(weight, place)?)?,
                false => var(g.vector)?,
            })?;
        }
        if inside { Ok(y) } else { y.broadcast_add(&bias) }
    }

    /// Norms of the columns of `w` with all deltas of its site, which are constants.
    fn norms(&self, w: Tensor, place: (usize, usize)) -> Result<Tensor> {
        let (outputs, mut v) = (w.dim(1)?, w);
        let constant = |tensor: usize| self.vars[tensor].as_tensor().detach();
        for lora in self.case.set.loras.iter().filter(|lora| (lora.layer, lora.site) == place) {
            let (mut a, mut b) = (constant(lora.a).t()?, constant(lora.b).t()?);
            if let Some(d) = lora.d {
                a = a.broadcast_mul(&constant(d))?;
            }
            if let Some(e) = lora.e {
                b = b.broadcast_mul(&constant(e))?;
            }
            let delta = (a.contiguous()?.matmul(&b.contiguous()?)? * f64::from(lora.scale))?;
            v = (v + delta.pad_with_zeros(1, lora.columns.start, outputs - lora.columns.end)?)?;
        }
        v.sqr()?.sum(0)?.sqrt()
    }

    /// The documented mask: element `column` of token `t` of row `index` of step 0.
    fn drop(&self, x: &Tensor, lora: &Lora, index: usize) -> Result<Tensor> {
        let p = self.case.set.dropout() as f32;
        let (t, inputs) = x.dims2()?;
        let (loras, layout) = (&self.case.set.loras, &self.case.set.layout);
        // The place of A, or a number beyond the store where several deltas have the same A.
        let mask = match loras.iter().filter(|other| other.a == lora.a).count() {
            1 => layout.tensors[lora.a].offset,
            _ => layout.len + loras.iter().position(|other| other == lora).unwrap(),
        };
        let key = rng::key(&[self.seed, rng::name("dropout"), 0])
            ^ (mask as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = (index * self.seq_len * inputs) as u64;
        let kept = |element: u64| rng::uniform(key, first + element) >= p;
        let factor = |element| if kept(element) { f64::from(1.0 / (1.0 - p)) } else { 0.0 };
        x * constant((0..(t * inputs) as u64).map(factor).collect(), &[t, inputs])?
    }

    fn attention(&self, qkv: &Tensor, layer: usize, row: &Row, prefix: Option<&Tensor>) -> Result<Tensor> {
        let config = &self.base.config;
        let (c, h, d, t) = (config.width, config.heads, config.head_width(), row.ids.len());
        let heads = |x: Tensor| x.reshape((x.dim(0)?, h, d))?.transpose(0, 1)?.contiguous();
        let part = |index: usize| heads(qkv.narrow(1, index * c, c)?.contiguous()?);
        let (q, mut k, mut v) = (part(0)?, part(1)?, part(2)?);
        let mut p = 0;
        if let Some(prefix) = prefix {
            p = prefix.dim(0)?;
            let vectors = |index: usize| heads(prefix.narrow(1, index * c, c)?.contiguous()?);
            k = Tensor::cat(&[vectors(2 * layer)?, k], 1)?;
            v = Tensor::cat(&[vectors(2 * layer + 1)?, v], 1)?;
        }
        let by_width = if config.scale_attn { (d as f64).sqrt() } else { 1.0 };
        let by_layer = if config.scale_attn_by_layer { (layer + 1) as f64 } else { 1.0 };
        let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? / (by_width * by_layer))?;
        let sees = |i: usize, j: usize| j < p || (row.starts[i] as usize..=i).contains(&(j - p));
        let mask = (0..t).flat_map(|i| (0..p + t).map(move |j| (i, j)));
        let mask = constant(mask.map(|(i, j)| if sees(i, j) { 1.0 } else { 0.0 }).collect(), &[t, p + t])?;
        let powers = scores.exp()?.broadcast_mul(&mask)?;
        let probabilities = powers.broadcast_div(&powers.sum_keepdim(2)?)?;
        probabilities.matmul(&v)?.transpose(0, 1)?.contiguous()?.reshape((t, c))
    }

    /// From the definitions: candle's own derivative of gelu has constants of six digits.
    fn activation(&self, x: &Tensor) -> Result<Tensor> {
        match self.base.config.activation {
            Activation::GeluTanh => {
                let inner = ((x + (x.powf(3.0)? * 0.044_715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
                (x * 0.5)? * (inner.tanh()? + 1.0)?
            }
            Activation::Gelu => (x * 0.5)? * ((x / 2f64.sqrt())?.erf()? + 1.0)?,
            Activation::Relu => x.relu(),
            Activation::Silu => x / (x.neg()?.exp()? + 1.0)?,
            Activation::Tanh => x.tanh(),
        }
    }

    /// Keys and values `(p, 2 l c)`.
    fn prefix(&self) -> Result<Option<Tensor>> {
        let Some(prefix) = &self.case.set.prefix else { return Ok(None) };
        let var = |tensor: usize| self.vars[tensor].as_tensor();
        Ok(Some(match prefix.values {
            PrefixValues::Direct { values } => var(values).clone(),
            PrefixValues::Projected { embedding, in_weight, in_bias, out_weight, out_bias, .. } => {
                let inner = var(embedding).matmul(&var(in_weight).t()?)?.broadcast_add(var(in_bias))?;
                inner.tanh()?.matmul(&var(out_weight).t()?)?.broadcast_add(var(out_bias))?
            }
        }))
    }
}

fn gradient_of(grads: &GradStore, var: &Var, name: &str) -> Vec<f64> {
    let gradient = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient: the graph is cut"));
    gradient.flatten_all().unwrap().to_vec1().unwrap()
}

/// t = 7 with holes, a shorter row, and one of two documents.
fn rows(vocab: usize) -> Vec<Row> {
    vec![row(1, 7, 1, vocab), row(2, 5, 0, vocab), pack(&[row(3, 3, 0, vocab), row(4, 4, 1, vocab)])]
}

fn adapters(base: &Base, dropout: f64) -> Vec<Case> {
    let all = || Some(lora("all-linear", dropout));
    let parts = || Some(lora("q,k,v,attn.c_proj,c_fc,mlp.c_proj", dropout));
    vec![
        case("lora", base, all(), None),
        case("parts", base, parts(), None),
        case("prefix", base, None, Some(prefix(5, None))),
        case("lora and prefix", base, all(), Some(prefix(5, None))),
        case("parts and projected prefix", base, parts(), Some(prefix(5, Some(13)))),
    ]
}

/// Worst difference by kind of tensor, for the table of docs/NUMERICS.md.
pub type Worst = BTreeMap<String, f64>;

pub fn check(base: &Arc<Base>, case: &Case, smoothing: f64, recompute: Recompute, worst: &mut Worst) {
    let policy = Policy { recompute, head_rows: 5, ..Policy::default() };
    let rows = rows(base.config.vocab).iter().map(|row| with_prompt(row, base, case)).collect::<Vec<_>>();
    let options = TrainerOptions {
        rows: 3,
        seq_len: rows.iter().map(|row| row.ids.len()).max().unwrap_or(SEQ_LEN),
        policy,
        optimizer: OptimizerKind::AdamW,
        adamw: AdamWOptions::default(),
        clip: 0.0,
        label_smoothing: smoothing,
        neftune: 0.0,
        seed: 3,
    };
    let mut trainer =
        Trainer::new(Arc::clone(base), case.set.clone(), &case.values, options, Arenas::real(None)).unwrap();
    let losses = trainer.accumulate(&[batch(&rows)]).unwrap();
    let gradient = trainer.gradient();

    let twin = Twin::new(base, case, options).unwrap();
    let loss = twin.loss(&rows).unwrap();
    let mean = (loss.clone() / losses.tokens as f64).unwrap();
    let mean = (mean + twin.penalty().unwrap()).unwrap();
    let expected: f64 = loss.to_scalar().unwrap();
    within((losses.sum / expected - 1.0).abs(), LOSS, &format!("loss of {} on {}", case.name, base.name));
    let grads = mean.backward().unwrap();
    for (slot, var) in case.set.layout.tensors.iter().zip(&twin.vars) {
        if !case.set.layout.groups[slot.group].trainable {
            assert!(gradient[slot.range()].iter().all(|&x| x == 0.0), "{} is frozen", slot.name);
            continue;
        }
        let expected = gradient_of(&grads, var, &slot.name);
        let size = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        assert!(
            size > 1e-6,
            "{} of {} on {} hardly has a gradient: {size:e}",
            slot.name,
            case.name,
            base.name
        );
        let found = difference(&gradient[slot.range()], &expected);
        let what = format!("{} of {} on {}: {found:.2e}", slot.name, case.name, base.name);
        assert!(found <= GRADIENT, "{what} above {GRADIENT:.0e}");
        let kind = [
            "lora_A",
            "lora_B",
            "lora_E",
            "vera_lambda_b",
            "vera_lambda_d",
            "ia3_l",
            "vector",
            "prompt_encoder",
            "prompt",
        ];
        let kind = kind.iter().find(|kind| slot.name.contains(**kind)).copied().unwrap_or("prompt");
        let entry = worst.entry(kind.to_owned()).or_default();
        *entry = entry.max(found);
    }
}

pub fn report(worst: &Worst, what: &str) {
    worst.iter().for_each(|(kind, found)| within(*found, GRADIENT, &format!("{kind} {what}")));
}

#[test]
fn autograd_agrees_on_every_adapter() {
    let base = golden("tiny");
    let mut worst = Worst::new();
    for case in adapters(&base, 0.0) {
        for (smoothing, recompute) in [(0.0, Recompute::None), (0.1, Recompute::All)] {
            check(&base, &case, smoothing, recompute, &mut worst);
        }
    }
    report(&worst, "on tiny");
}

#[test]
fn autograd_agrees_under_dropout() {
    let base = golden("tiny");
    let mut worst = Worst::new();
    for case in adapters(&base, 0.2) {
        for recompute in [Recompute::Every(2), Recompute::Linear] {
            check(&base, &case, 0.0, recompute, &mut worst);
        }
    }
    report(&worst, "on tiny, dropout 0.2");
}

#[test]
fn autograd_agrees_on_every_kind_of_base() {
    let mut worst = Worst::new();
    let names =
        ["relu", "gelu", "odd_heads", "n_inner", "ln_eps", "unscaled_attn", "inverse_layer_idx", "untied"];
    for name in names {
        let base = golden(name);
        for case in adapters(&base, 0.0) {
            check(&base, &case, 0.0, Recompute::None, &mut worst);
        }
    }
    report(&worst, "on the golden bases");
}

/// Sizes that are multiples of nothing, and the activation that no golden base has.
#[test]
fn autograd_agrees_at_odd_sizes() {
    let sizes = Sizes { layers: 3, heads: 7, width: 35, inner: 53, positions: 13, vocab: 97 };
    let mut worst = Worst::new();
    for activation in ["silu", "gelu_new"] {
        let random = random_base(sizes, activation);
        for case in adapters(&random.base, 0.0) {
            check(&random.base, &case, 0.1, Recompute::None, &mut worst);
        }
    }
    report(&worst, "on odd sizes");
}

/// The twin multiplies by what the codes stand for.
#[test]
fn autograd_agrees_on_an_8_bit_base() {
    let sizes = Sizes { layers: 2, heads: 7, width: 35, inner: 70, positions: 13, vocab: 97 };
    let random = random_base(sizes, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let base = Base::load_as(&random.base.source, "coded", cache.path(), BaseDType::Q8).unwrap();
    let (base, mut worst) = (Arc::new(base), Worst::new());
    for case in adapters(&base, 0.0) {
        check(&base, &case, 0.0, Recompute::None, &mut worst);
    }
    report(&worst, "on an 8-bit base");
}
