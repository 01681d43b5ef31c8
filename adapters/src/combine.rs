//! LoRAs combined into one, as PEFT 0.21.2 does it (`LoraModel.add_weighted_adapter`, `peft/utils/merge_utils.py`).
//!
//! A module of adapter n has A_n, B_n and the scale s_n; w_n is the adapter's weight. The methods `linear`, `ties`,
//! `dare_linear`, `dare_ties` and `magnitude_prune` mix the A_n with weights `sign(w_n) sqrt(|w_n s_n|)` and the B_n with
//! `sqrt(|w_n s_n|)`; those with `_svd` mix the deltas `s_n B_n A_n` with weights w_n, and the result is cut to a rank by
//! its singular values; `cat` puts `w_n s_n A_n` one below the other, and the B_n side by side.
//!
//! To mix is to add up tensors times weights, after the following.
//!
//! - `magnitude_prune` and `ties` keep the share `density` of each tensor that is the largest in magnitude.
//! - `dare` keeps each value with the probability `density`, and divides those that it keeps by `density` (Yu et al.
//!   2024, arXiv:2311.03099).
//! - `ties` elects a sign for each place, that of the sum of the tensors (`total`) or of their signs (`frequency`), and
//!   takes the mean of the values that have it (Yadav et al. 2023, arXiv:2306.01708).
//!
//! The result has scale 1: its alpha is its rank.

use std::fmt;

use engraft_util::rng;

use crate::{
    AdapterSet, BaseDescription, Error, LoraSpec, Result, Targets,
    peft::modules::modules,
    svd::{Matrix, Svd, product},
};

/// A way to combine LoRAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CombineMethod {
    /// PEFT's name for it, `combination_type`.
    pub name: &'static str,
    sparse: Sparse,
    elects: bool,
    form: Form,
}

/// Which values are set to 0 before tensors are mixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sparse {
    Nothing,
    Smallest,
    Random,
}

/// The tensors that are mixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Factors,
    Stacked,
    Deltas,
}

/// Which sign a place gets with `ties`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MajoritySign {
    /// That of the sum.
    #[default]
    Total,
    /// That which more tensors have.
    Frequency,
}

impl CombineMethod {
    const fn of(name: &'static str, sparse: Sparse, elects: bool, form: Form) -> Self {
        Self { name, sparse, elects, form }
    }

    /// All methods, by PEFT's names.
    pub const ALL: [Self; 11] = [
        Self::of("linear", Sparse::Nothing, false, Form::Factors),
        Self::of("cat", Sparse::Nothing, false, Form::Stacked),
        Self::of("svd", Sparse::Nothing, false, Form::Deltas),
        Self::of("ties", Sparse::Smallest, true, Form::Factors),
        Self::of("ties_svd", Sparse::Smallest, true, Form::Deltas),
        Self::of("dare_linear", Sparse::Random, false, Form::Factors),
        Self::of("dare_ties", Sparse::Random, true, Form::Factors),
        Self::of("dare_linear_svd", Sparse::Random, false, Form::Deltas),
        Self::of("dare_ties_svd", Sparse::Random, true, Form::Deltas),
        Self::of("magnitude_prune", Sparse::Smallest, false, Form::Factors),
        Self::of("magnitude_prune_svd", Sparse::Smallest, false, Form::Deltas),
    ];

    /// The method of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name == name)
    }

    /// Whether it needs a density.
    pub fn is_sparse(self) -> bool {
        self.sparse != Sparse::Nothing
    }

    /// Whether it keeps values at random.
    pub fn is_random(self) -> bool {
        self.sparse == Sparse::Random
    }

    /// Whether it elects signs.
    pub fn elects_signs(self) -> bool {
        self.elects
    }

    /// Whether the rank of its result can be chosen.
    pub fn has_any_rank(self) -> bool {
        self.form == Form::Deltas
    }
}

/// A LoRA to be combined with others.
#[derive(Debug, Clone, Copy)]
pub struct CombinePart<'a> {
    /// Its set, a LoRA and nothing else.
    pub set: &'a AdapterSet,
    /// Its flat store.
    pub values: &'a [f32],
    /// Its weight w; may be negative.
    pub weight: f64,
}

/// How LoRAs are combined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CombineOptions {
    /// Which of PEFT's `combination_type`s.
    pub method: CombineMethod,
    /// Share of the values that a sparse method keeps, in (0, 1].
    pub density: f64,
    /// Rank of the result of a method with singular values; `None` for the largest of the parts.
    pub rank: Option<usize>,
    /// How `ties` elects signs.
    pub majority_sign: MajoritySign,
    /// Seed of what `dare` keeps.
    pub seed: u64,
}

/// The combined LoRA.
#[derive(Debug)]
pub struct Combined {
    /// The LoRA, resolved.
    pub set: AdapterSet,
    /// Its flat store.
    pub values: Vec<f32>,
    /// What the cut to a rank has lost: Frobenius norm of the rest over that of all deltas; `None` where nothing is cut.
    pub lost: Option<f64>,
}

/// Which tensor a random mask is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Masked {
    A,
    B,
    Delta,
}

/// Says whether `dare` keeps a value: of which module (its path) and tensor, of which of the adapters that have
/// the module, at which place. A is [rank, inputs], B [outputs, rank] and a delta [outputs, inputs].
pub(crate) type Keep<'a> = dyn Fn(&str, Masked, usize, usize) -> bool + 'a;

/// Combines LoRAs of one base. A single one is scaled, by whatever method, as PEFT does.
///
/// # Errors
/// [`Error::NotCombinable`] for sets that have more than a LoRA, or ranks that differ where A and B are mixed.
pub fn combine(parts: &[CombinePart], options: &CombineOptions, base: &BaseDescription) -> Result<Combined> {
    let keep = |path: &str, tensor: Masked, number: usize, at: usize| {
        let key = rng::key(&[options.seed, rng::name(path), tensor as u64, number as u64]);
        f64::from(rng::uniform(key, at as u64)) < options.density
    };
    combine_keeping(parts, options, base, &keep)
}

/// As [`combine`], with the choice of what `dare` keeps handed in.
pub(crate) fn combine_keeping(
    parts: &[CombinePart],
    options: &CombineOptions,
    base: &BaseDescription,
    keep: &Keep,
) -> Result<Combined> {
    let mut options = *options;
    if parts.len() == 1 {
        options.method = CombineMethod::ALL[0];
    }
    let mut all = Vec::new();
    for part in parts {
        refuse_more_than_lora(part.set)?;
        crate::peft::check_count("the flat store", part.values, part.set.layout.len)?;
        all.push(factors(part, base));
    }
    let ranks: Vec<usize> =
        all.iter().map(|own| own.iter().map(|module| module.rank).max().unwrap_or(0)).collect();
    let rank = match options.method.form {
        Form::Factors => one_rank(&ranks, &options.method)?,
        Form::Stacked => ranks.iter().sum(),
        Form::Deltas => options.rank.or(ranks.iter().copied().max()).unwrap_or(0),
    };
    let places = places(&all);
    let dropout = parts.iter().find_map(|part| Some(part.set.spec.lora.as_ref()?.dropout));
    let spec = spec_of(&places, rank, dropout.unwrap_or_default(), base);
    let set = AdapterSet::new(&spec.into(), base)?;
    let mut values = vec![0.0; set.layout.len];
    let (mut lost, mut whole) = (0.0, 0.0);
    for lora in &set.loras {
        let own = all.iter().flatten().filter(|module| module.place == (lora.layer, lora.site));
        let own: Vec<&Factors> = own.collect();
        let mixed = Mix { options: &options, modules: &own, keep }.factors(rank)?;
        values[set.layout.tensors[lora.a].range()].copy_from_slice(&mixed.a);
        values[set.layout.tensors[lora.b].range()].copy_from_slice(&mixed.b);
        (lost, whole) = (lost + mixed.lost, whole + mixed.whole);
    }
    let share = if whole > 0.0 { (lost / whole).sqrt() } else { 0.0 };
    Ok(Combined { set, values, lost: options.method.has_any_rank().then_some(share) })
}

/// A module of an adapter as PEFT sees it, parts fused.
struct Factors {
    /// Layer and site.
    place: (usize, usize),
    path: String,
    inputs: usize,
    outputs: usize,
    rank: usize,
    /// Weight of the adapter.
    weight: f64,
    scale: f64,
    /// [rank, inputs].
    a: Vec<f64>,
    /// [outputs, rank].
    b: Vec<f64>,
}

fn factors(part: &CombinePart, base: &BaseDescription) -> Vec<Factors> {
    let wide = |values: &[f32]| values.iter().map(|&value| value.into()).collect();
    let root = part.set.spec.lora.as_ref().is_some_and(|lora| lora.rslora);
    let modules = modules(part.set, &LoraSpec::KIND, root, base).into_iter();
    let of = |module: crate::peft::modules::Module| Factors {
        place: (module.layer, module.site),
        inputs: module.inputs,
        outputs: module.outputs,
        rank: module.rank,
        weight: part.weight,
        scale: part.set.loras[module.loras.start].scale.into(),
        a: wide(&module.fuse_a(part.set, part.values)),
        b: wide(&module.fuse_b(part.set, part.values)),
        path: module.path,
    };
    modules.map(of).collect()
}

fn refuse_more_than_lora(set: &AdapterSet) -> Result<()> {
    let plain = |lora: &crate::Lora| set.is_of(lora, &LoraSpec::KIND) && lora.d.is_none() && lora.e.is_none();
    let alone = set.vectors.is_empty() && set.norms.is_empty() && set.embedding.is_none();
    let in_front = set.prefix.is_some() || set.prompt.is_some();
    if !set.loras.is_empty() && set.loras.iter().all(plain) && alone && !in_front {
        return Ok(());
    }
    let why =
        "an adapter that is no plain LoRA cannot be combined; give LoRAs without other methods".to_owned();
    Err(Error::NotCombinable { why })
}

/// The rank that all adapters have.
fn one_rank(ranks: &[usize], method: &CombineMethod) -> Result<usize> {
    let first = ranks.first().copied().unwrap_or(0);
    if ranks.iter().all(|&rank| rank == first) {
        Ok(first)
    } else {
        Err(ranks_differ(ranks, "the adapters", method))
    }
}

fn ranks_differ(ranks: &[usize], of: impl fmt::Display, method: &CombineMethod) -> Error {
    let ranks = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ");
    let why = format!(
        "the ranks of {of} are {ranks}, and {} needs equal ones; take cat, or a method with svd",
        method.name
    );
    Error::NotCombinable { why }
}

/// Layers and sites that any adapter has, in order.
fn places(all: &[Vec<Factors>]) -> Vec<(usize, usize)> {
    let mut places: Vec<_> = all.iter().flatten().map(|module| module.place).collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// A LoRA of scale 1 on exactly these modules: by sites and layers where these can say it, else by paths.
pub(crate) fn spec_of(
    places: &[(usize, usize)],
    rank: usize,
    dropout: f64,
    base: &BaseDescription,
) -> LoraSpec {
    let distinct = |which: fn(&(usize, usize)) -> usize| {
        let mut all: Vec<usize> = places.iter().map(which).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let (layers, sites) = (distinct(|place| place.0), distinct(|place| place.1));
    let (targets, layers) = if layers.len() * sites.len() == places.len() {
        let names = sites.iter().map(|&site| base.sites[site].name.clone()).collect();
        (names, (layers.len() < base.layers).then_some(layers))
    } else {
        (places.iter().map(|&(layer, site)| base.sites[site].module(layer)).collect(), None)
    };
    let (targets, alpha) = (Targets::List(targets), rank as f64);
    LoraSpec { rank, alpha, targets, layers, dropout, ..LoraSpec::default() }
}

/// A module of all adapters that have it.
struct Mix<'a> {
    options: &'a CombineOptions,
    modules: &'a [&'a Factors],
    keep: &'a Keep<'a>,
}

/// The combined module.
struct Mixed {
    /// [rank, inputs].
    a: Vec<f32>,
    /// [outputs, rank].
    b: Vec<f32>,
    /// Square of the norm that a cut has lost.
    lost: f64,
    /// Square of the norm before.
    whole: f64,
}

impl Mix<'_> {
    fn factors(&self, rank: usize) -> Result<Mixed> {
        match self.options.method.form {
            Form::Factors => self.mixed_factors(rank),
            Form::Stacked => Ok(self.stacked(rank)),
            Form::Deltas => Ok(self.cut(rank)),
        }
    }

    fn mixed_factors(&self, rank: usize) -> Result<Mixed> {
        let ranks: Vec<usize> = self.modules.iter().map(|module| module.rank).collect();
        let own = ranks.first().copied().unwrap_or(0);
        if ranks.iter().any(|&other| other != own) {
            return Err(ranks_differ(&ranks, &self.modules[0].path, &self.options.method));
        }
        let roots = |signed: bool| -> Vec<f64> {
            let root = |module: &&Factors| {
                let weight = module.weight * module.scale;
                weight.abs().sqrt() * if signed && weight < 0.0 { -1.0 } else { 1.0 }
            };
            self.modules.iter().map(root).collect()
        };
        let a =
            self.mixed(Masked::A, self.modules.iter().map(|module| module.a.clone()).collect(), &roots(true));
        let b = self.mixed(
            Masked::B,
            self.modules.iter().map(|module| module.b.clone()).collect(),
            &roots(false),
        );
        // A pattern may give a module fewer ranks than the adapter has: the rest is zeros.
        let (inputs, outputs) = (self.modules[0].inputs, self.modules[0].outputs);
        let mut mixed = Mixed::zeros(rank, inputs, outputs);
        mixed.put(0, own, &a, &b);
        Ok(mixed)
    }

    fn stacked(&self, rank: usize) -> Mixed {
        let mut mixed = Mixed::zeros(rank, self.modules[0].inputs, self.modules[0].outputs);
        let mut first = 0;
        for module in self.modules {
            let weight = module.weight * module.scale;
            let a: Vec<f64> = module.a.iter().map(|a| a * weight).collect();
            mixed.put(first, module.rank, &a, &module.b);
            first += module.rank;
        }
        mixed
    }

    /// The mixed delta, cut to `rank` by its singular values.
    fn cut(&self, rank: usize) -> Mixed {
        let (inputs, outputs) = (self.modules[0].inputs, self.modules[0].outputs);
        let svd = if self.options.method.is_sparse() {
            let deltas = self.modules.iter().map(|module| {
                let left = Matrix::new(outputs, module.rank, module.b.clone());
                let right = module.a.iter().map(|a| a * module.scale).collect();
                product(&left, &Matrix::new(module.rank, inputs, right)).values
            });
            let weights: Vec<f64> = self.modules.iter().map(|module| module.weight).collect();
            Svd::of(&Matrix::new(outputs, inputs, self.mixed(Masked::Delta, deltas.collect(), &weights)))
        } else {
            // The sum of the deltas is a product of stacked factors.
            let ranks: usize = self.modules.iter().map(|module| module.rank).sum();
            let (mut left, mut right) = (vec![0.0; outputs * ranks], Vec::with_capacity(ranks * inputs));
            let mut first = 0;
            for module in self.modules {
                right.extend(module.a.iter().map(|a| a * module.weight * module.scale));
                for (row, b) in left.chunks_exact_mut(ranks).zip(module.b.chunks_exact(module.rank)) {
                    row[first..first + module.rank].copy_from_slice(b);
                }
                first += module.rank;
            }
            Svd::of_product(&Matrix::new(outputs, ranks, left), &Matrix::new(ranks, inputs, right))
        };
        let square = |values: &[f64]| values.iter().map(|s| s * s).sum();
        let (b, a) = svd.factors(rank);
        let lost = square(&svd.values[rank.min(svd.values.len())..]);
        Mixed { a, b, lost, whole: square(&svd.values) }
    }

    /// Tensors of one shape, mixed.
    fn mixed(&self, which: Masked, mut tensors: Vec<Vec<f64>>, weights: &[f64]) -> Vec<f64> {
        let CombineOptions { method, density, majority_sign, .. } = *self.options;
        // PEFT prunes nothing from a density of 1 on.
        if density < 1.0 {
            for (number, tensor) in tensors.iter_mut().enumerate() {
                match method.sparse {
                    Sparse::Nothing => {}
                    Sparse::Smallest => keep_largest(tensor, density),
                    Sparse::Random => tensor.iter_mut().enumerate().for_each(|(at, value)| {
                        let kept = (self.keep)(&self.modules[number].path, which, number, at);
                        *value = if kept { *value / density } else { 0.0 };
                    }),
                }
            }
        }
        let len = tensors.first().map_or(0, Vec::len);
        let each = |at: usize| {
            let values = tensors.iter().map(|tensor| tensor[at]);
            let weighted = values.clone().zip(weights);
            if !method.elects {
                return weighted.map(|(value, weight)| value * weight).sum();
            }
            let sum: f64 = match majority_sign {
                MajoritySign::Total => values.sum(),
                MajoritySign::Frequency => values.map(sign).sum(),
            };
            let elected = if sum >= 0.0 { 1.0 } else { -1.0 };
            let having = weighted.filter(|(value, _)| sign(*value) == elected);
            let count = having.clone().count().max(1);
            having.map(|(value, weight)| value * weight).sum::<f64>() / count as f64
        };
        (0..len).map(each).collect()
    }
}

impl Mixed {
    fn zeros(rank: usize, inputs: usize, outputs: usize) -> Self {
        Self { a: vec![0.0; rank * inputs], b: vec![0.0; outputs * rank], lost: 0.0, whole: 0.0 }
    }

    /// Puts factors of `own` ranks at the ranks from `first` on.
    fn put(&mut self, first: usize, own: usize, a: &[f64], b: &[f64]) {
        let inputs = a.len() / own.max(1);
        let rows = self.a[first * inputs..].iter_mut().zip(a);
        rows.for_each(|(to, from)| *to = *from as f32);
        let rank = self.b.len() / (b.len() / own.max(1)).max(1);
        for (to, from) in self.b.chunks_exact_mut(rank.max(1)).zip(b.chunks_exact(own.max(1))) {
            to[first..first + own].iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
        }
    }
}

/// 0 for 0, as PyTorch has it.
fn sign(value: f64) -> f64 {
    if value == 0.0 { 0.0 } else { value.signum() }
}

/// Sets to 0 all but the share `density` of values that is the largest in magnitude, rounded down; of equal ones the
/// first stay.
fn keep_largest(values: &mut [f64], density: f64) {
    let kept = (density * values.len() as f64) as usize;
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()));
    order[kept..].iter().for_each(|&at| values[at] = 0.0);
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
