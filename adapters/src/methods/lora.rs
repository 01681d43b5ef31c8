//! LoRA: low-rank deltas on linear modules (Hu et al. 2021, arXiv:2106.09685).
//!
//! Initial values: A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)), which is `kaiming_uniform_(a=sqrt(5))`; B = 0. `initial.rs` has
//! the others. Of the embedding of tokens A = 0 and B ~ N(0, 1).

use std::collections::BTreeMap;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{AdapterSpec, Kind, Method, ln_tuning};
use crate::{
    AdapterSet, BaseDescription, Contribution, EmbeddingDelta, Error, Group, Lora, Result, Targets,
    init::Init,
    layout::Slots,
    peft::{self, Files, Findings, TensorFile},
    set::layer_ranges,
    targets::{self, Chosen, Patterns, Selected},
};

pub(crate) mod beside;
pub(crate) mod files;
pub(crate) mod initial;

use beside::TrainedBiases;
use files::Variant;
use initial::InitialFactors;

/// A LoRA: `y = x W + b + s (dropout(x) A^T) B^T`.
///
/// The scale s is alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023,
/// arXiv:2312.03732).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSpec {
    /// Rank r of the delta; of each part's delta where parts are targets.
    pub rank: usize,
    /// Numerator alpha of the scale.
    pub alpha: f64,
    /// Modules or parts the LoRA attaches to.
    pub targets: Targets,
    /// Layers it attaches to; `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Probability in [0, 1) that an input element of the LoRA branch is dropped.
    pub dropout: f64,
    /// Whether the scale is alpha / sqrt(rank).
    pub rslora: bool,
    /// Ranks that differ: regex on the end of the module path -> rank; the first match in key order wins.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas that differ, keyed like `rank_pattern`.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Biases that are trained, too.
    #[serde(skip_serializing_if = "TrainedBiases::is_none")]
    pub bias: TrainedBiases,
    /// Layer norms that are trained as well: names, paths, or a regular expression for whole paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_norms: Option<Targets>,
    /// Factor of the learning rate of B (LoRA+, Hayou et al. 2024, arXiv:2402.12354), and of vectors, as in PEFT. No
    /// file of an adapter has it.
    #[serde(skip_serializing_if = "is_one")]
    pub lora_plus_ratio: f64,
    /// Whether A stays as it starts (LoRA-FA, Zhang et al. 2023, arXiv:2308.03303). No file of an adapter has it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub freeze_a: bool,
    /// Initial values of A and B. A file of an adapter has them where frozen copies belong to them.
    #[serde(skip_serializing_if = "InitialFactors::is_default")]
    pub init_lora_weights: InitialFactors,
}

impl Default for LoraSpec {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            targets: Targets::List(vec!["c_attn".to_owned()]),
            layers: None,
            dropout: 0.0,
            rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            bias: TrainedBiases::None,
            saved_norms: None,
            lora_plus_ratio: 1.0,
            freeze_a: false,
            init_lora_weights: InitialFactors::default(),
        }
    }
}

fn is_one(ratio: &f64) -> bool {
    *ratio == 1.0
}

impl LoraSpec {
    /// The scale of a delta with this rank and alpha.
    pub fn scale(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Rank and alpha of the module at `path`: those of the first pattern that matches it, else those of all.
    pub(crate) fn rank_and_alpha(&self, path: &str) -> Result<(usize, f64)> {
        let rank = targets::pattern_value("rank_pattern", &self.rank_pattern, path)?.unwrap_or(self.rank);
        let alpha = targets::pattern_value("alpha_pattern", &self.alpha_pattern, path)?.unwrap_or(self.alpha);
        Ok((rank, alpha))
    }

    /// How an optimizer treats A.
    fn a_group(&self) -> Group {
        if self.freeze_a { Group::FROZEN } else { Group::DEFAULT }
    }

    /// How an optimizer treats B and vectors.
    pub(super) fn vector_group(&self) -> Group {
        Group { lr_factor: self.lora_plus_ratio, ..Group::DEFAULT }
    }
}

/// LoRA itself, among the methods that have its files.
static PLAIN: Variant =
    Variant { kind: &LoraSpec::KIND, field: None, wrap: |spec| AdapterSpec::from(spec), drops: true };

impl LoraSpec {
    /// The kind `lora`.
    pub const KIND: Kind =
        Kind { name: "lora", peft_type: "LORA", claims: |_| true, read: |fields| PLAIN.stored(fields) };

    /// The deltas and what is trained beside them, and their tensors.
    pub(super) fn contribution(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let chosen = targets::select_with_embedding(&self.targets, self.layers.as_deref(), base)?;
        let (values, of_embedding) = ranks_and_alphas(self, &chosen, base)?;
        let mut loras = Vec::new();
        for (&one, (rank, alpha)) in chosen.modules.iter().zip(values) {
            let (path, inputs) = (one.path(base), base.sites[one.site].inputs);
            let lora = self.push(one, rank, alpha, base, slots)?;
            self.check_initial(&lora, &path, inputs)?;
            let prefixed = format!("{}{path}", peft::MODULE_PREFIX);
            let has_copy = self.init_lora_weights.has_copies();
            let copy = has_copy.then(|| initial::push_copy(&lora, &prefixed, inputs, slots)).transpose()?;
            loras.extend([Some(lora), copy].into_iter().flatten());
        }
        let embedding = base.token_embedding.as_ref().zip(of_embedding);
        let embedding =
            embedding.map(|(path, values)| self.push_embedding(path, values, base, slots)).transpose()?;
        let beside = self.beside(&loras, base, slots)?;
        Ok(Contribution { loras, embedding, ..beside })
    }

    /// The delta on the embedding of tokens, and its two tensors. In LoRA+ they keep the plain learning rate: the one that
    /// starts at 0 is A.
    fn push_embedding(
        &self,
        path: &str,
        (rank, alpha): (usize, f64),
        base: &BaseDescription,
        slots: &mut Slots,
    ) -> Result<EmbeddingDelta> {
        if self.freeze_a {
            return Err(Error::FrozenEmbedding { module: path.to_owned() });
        }
        let path = format!("{}{path}", peft::MODULE_PREFIX);
        Ok(EmbeddingDelta {
            rank,
            scale: self.scale(rank, alpha) as f32,
            a: slots.push(format!("{path}.lora_embedding_A"), &[rank, base.vocab])?,
            b: slots.push(format!("{path}.lora_embedding_B"), &[base.width, rank])?,
        })
    }

    /// The delta of rank `rank` and scale [`Self::scale`] on `one`, and its two tensors.
    fn push(
        &self,
        one: Selected,
        rank: usize,
        alpha: f64,
        base: &BaseDescription,
        slots: &mut Slots,
    ) -> Result<Lora> {
        let site = &base.sites[one.site];
        let part = one.part.map(|part| &site.parts[part]);
        let columns = part.map_or(0..site.outputs, |part| part.columns.clone());
        let path = format!("{}{}", peft::MODULE_PREFIX, one.path(base));
        Ok(Lora {
            layer: one.layer,
            site: one.site,
            part: part.map(|part| part.name.clone()),
            rank,
            alpha,
            scale: self.scale(rank, alpha) as f32,
            a: slots.push_to(self.a_group(), format!("{path}.lora_A.weight"), &[rank, site.inputs])?,
            b: slots.push_to(self.vector_group(), format!("{path}.lora_B.weight"), &[columns.len(), rank])?,
            d: None,
            e: None,
            columns,
        })
    }

    /// Writes the initial values of what a method of `kind` has of a LoRA.
    pub(super) fn init_as(
        &self,
        kind: &Kind,
        set: &AdapterSet,
        values: &mut [f32],
        from: &Init,
    ) -> Result<()> {
        self.init_lora_weights.write(kind, set, values, from)?;
        let slots = &set.layout.tensors;
        let b = set.embedding.as_ref().map(|delta| &slots[delta.b]);
        b.into_iter().filter(|b| b.method == kind.name).for_each(|b| from.normal(values, b));
        Self::init_beside(kind, set, values, from)
    }

    /// A line per site, part and rank of a method of `kind`: `attn.c_attn: layers 0-11`.
    pub(super) fn matched_by(&self, kind: &Kind, set: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        type Key<'a> = (usize, Option<&'a str>, usize); // site, part, rank
        let mut lines: Vec<(Key, Vec<usize>)> = Vec::new();
        let is_trained = |lora: &&Lora| !initial::is_copy(set, lora);
        for lora in set.loras_of(kind).filter(is_trained) {
            let key = (lora.site, lora.part.as_deref(), lora.rank);
            match lines.iter_mut().find(|(known, _)| *known == key) {
                Some((_, layers)) => layers.push(lora.layer),
                None => lines.push((key, vec![lora.layer])),
            }
        }
        let other = |rank: usize| if rank == self.rank { String::new() } else { format!(" (rank {rank})") };
        let line = |((site, part, rank), layers): (Key, Vec<usize>)| {
            let part = part.map(|part| format!(".{part}")).unwrap_or_default();
            format!("{}{part}: {}{}", base.sites[site].name, layer_ranges(&layers), other(rank))
        };
        let mut lines: Vec<String> = lines.into_iter().map(line).collect();
        let embedding = base.token_embedding_name().zip(set.embedding.as_ref());
        lines.extend(
            embedding.map(|(name, delta)| format!("{name}: embedding of tokens{}", other(delta.rank))),
        );
        match self.bias {
            TrainedBiases::None => {}
            TrainedBiases::LoraOnly => lines.push("biases of these modules".to_owned()),
            TrainedBiases::All => lines.push("all biases".to_owned()),
        }
        let norms = self.saved_norms.as_ref();
        let norms =
            norms.map(|norms| ln_tuning::chosen(beside::SAVED_NORMS, norms, base).unwrap_or_default());
        lines.extend(ln_tuning::matched(&norms.unwrap_or_default(), base));
        lines
    }

    /// The lines that describe a method of `kind`.
    pub(super) fn lines_of(&self, kind: &Kind) -> Vec<(&'static str, String)> {
        let root = if self.rslora { " / sqrt(rank)" } else { " / rank" };
        let mut lines = vec![
            ("kind", format!("{}, rank {}, alpha {}, scale alpha{root}", kind.name, self.rank, self.alpha)),
            ("targets", self.targets.to_string()),
        ];
        if !self.bias.is_none() {
            lines.push(("bias", self.bias.to_string()));
        }
        lines.extend(self.saved_norms.iter().map(|norms| ("norms", norms.to_string())));
        if !is_one(&self.lora_plus_ratio) {
            lines.push(("lora+", format!("learning rate of B x {}", self.lora_plus_ratio)));
        }
        if self.freeze_a {
            lines.push(("lora-fa", "A is frozen".to_owned()));
        }
        if !self.init_lora_weights.is_default() {
            lines.push(("initial", self.init_lora_weights.to_string()));
        }
        lines
    }
}

impl AdapterSpec {
    /// The options of its LoRA, or of its DoRA, which has the same.
    pub fn lora_options(&self) -> Option<&LoraSpec> {
        self.lora.as_ref().or(self.dora.as_ref().map(|dora| &dora.lora))
    }

    /// As [`AdapterSpec::lora_options`], to be changed before a set is made.
    pub fn lora_options_mut(&mut self) -> Option<&mut LoraSpec> {
        self.lora.as_mut().or(self.dora.as_mut().map(|dora| &mut dora.lora))
    }
}

impl Method for LoraSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        self.contribution(base, slots)
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        self.init_as(&Self::KIND, set, values, from)
    }

    fn dropout(&self) -> Option<f64> {
        Some(self.dropout)
    }

    fn matched(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        self.matched_by(&Self::KIND, set, base)
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        self.lines_of(&Self::KIND)
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        Ok(PLAIN.files(self, set, values, base))
    }

    fn read(
        &self,
        set: &AdapterSet,
        base: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        PLAIN.read(set, base, tensors, values, findings)
    }
}

// ---- ranks and alphas ----

/// Rank and alpha of a delta.
type RankAndAlpha = (usize, f64);

/// Rank and alpha of each selected module, and of the embedding: the pattern's where a key matches, else the default.
fn ranks_and_alphas(
    lora: &LoraSpec,
    Chosen { modules: chosen, embedding }: &Chosen,
    base: &BaseDescription,
) -> Result<(Vec<RankAndAlpha>, Option<RankAndAlpha>)> {
    check_values(lora)?;
    let mut ranks = Patterns::new("rank_pattern", &lora.rank_pattern)?;
    let mut alphas = Patterns::new("alpha_pattern", &lora.alpha_pattern)?;
    let path = base.token_embedding.as_deref().filter(|_| *embedding);
    let of_embedding = path
        .map(|path| (ranks.value_at(path).unwrap_or(lora.rank), alphas.value_at(path).unwrap_or(lora.alpha)));
    let found: Vec<_> = chosen
        .iter()
        .map(|&one| {
            let rank = ranks.value(one, base).unwrap_or(lora.rank);
            (rank, alphas.value(one, base).unwrap_or(lora.alpha))
        })
        .collect();
    let example = chosen.first().map(|one| one.path(base)).or(path.map(str::to_owned)).unwrap_or_default();
    ranks.refuse_unmatched(&example)?;
    alphas.refuse_unmatched(&example)?;
    for (pair, values) in chosen.windows(2).zip(found.windows(2)) {
        let same_module = (pair[0].layer, pair[0].site) == (pair[1].layer, pair[1].site);
        if same_module && values[0] != values[1] {
            return Err(Error::PartsDiffer { module: pair[0].module(base) });
        }
    }
    Ok((found, of_embedding))
}

/// Refuses ranks, alphas and a dropout that nothing can compute with.
pub(crate) fn check_values(lora: &LoraSpec) -> Result<()> {
    let option = |pattern: &str, key: Option<&String>| match key {
        None => pattern.to_owned(),
        Some(key) => format!("{pattern}_pattern `{key}`"),
    };
    let ranks =
        std::iter::once((None, lora.rank)).chain(lora.rank_pattern.iter().map(|(k, &v)| (Some(k), v)));
    if let Some((key, _)) = ranks.into_iter().find(|&(_, rank)| rank == 0) {
        return Err(Error::ZeroRank { option: option("rank", key) });
    }
    let alphas =
        std::iter::once((None, lora.alpha)).chain(lora.alpha_pattern.iter().map(|(k, &v)| (Some(k), v)));
    // The scale is F32: an alpha beyond its range is as good as infinite.
    if let Some((key, value)) = alphas.into_iter().find(|&(_, alpha)| !(alpha as f32).is_finite()) {
        return Err(Error::Alpha { option: option("alpha", key), value });
    }
    if !(lora.lora_plus_ratio.is_finite() && lora.lora_plus_ratio > 0.0) {
        return Err(Error::LoraPlusRatio { value: lora.lora_plus_ratio });
    }
    if !(0.0..1.0).contains(&lora.dropout) {
        return Err(Error::Dropout { value: lora.dropout });
    }
    Ok(())
}

// ---- reference maths ----

/// `y = x W + b + s (x A^T) B^T` (Hu et al. 2021, section 4.1), without dropout.
///
/// x [.., inputs], W [inputs, outputs], b `[outputs]`, A [rank, inputs], B [outputs, rank];
/// y [.., outputs].
///
/// # Errors
/// Shapes that do not belong together.
pub fn lora_linear(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> candle_core::Result<Tensor> {
    let xa = x.broadcast_matmul(&a.t()?)?;
    let y = (x.broadcast_matmul(w)? + (xa.broadcast_matmul(&b.t()?)? * scale)?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// The weight that folds a LoRA into its base: `W + s (B A)^T`.
///
/// W [inputs, outputs], A [rank, inputs], B [outputs, rank].
///
/// # Errors
/// Shapes that do not belong together.
pub fn merged(w: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    w + merge_delta(a, b, scale)?
}

/// `s (B A)^T`, [inputs, outputs], from A [rank, inputs] and B [outputs, rank].
///
/// # Errors
/// Shapes that do not belong together.
pub fn merge_delta(a: &Tensor, b: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    (b.matmul(a)?.t()? * scale)?.contiguous()
}
