//! Adapters as plain LoRAs, module by module: what every format of LoRA files can hold, and how a set is made of it.

use std::{borrow::Cow, collections::BTreeMap, path::Path};

use crate::{
    AdapterSet, BaseDescription, Error, FoldPart, Lora, LoraSpec, Problem, Result, Targets, peft::Loaded,
};

/// A low-rank delta `y += s (x A^T) B^T` with s = alpha / rank, on a module or on a part of its columns.
#[derive(Debug, Clone, PartialEq)]
pub struct PlainLora {
    /// Layer of the base, from 0.
    pub layer: usize,
    /// Index into [`BaseDescription::sites`].
    pub site: usize,
    /// Name of the part, `None` for the whole module.
    pub part: Option<String>,
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// A, [rank, inputs].
    pub a: Vec<f32>,
    /// B, [columns, rank].
    pub b: Vec<f32>,
}

impl PlainLora {
    /// The scale s.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// The same delta with scale `scale` or, where that is 0, with a B of zeros.
    #[must_use]
    pub fn with_scale(mut self, scale: f64) -> Self {
        let factor = if scale == 0.0 { 0.0 } else { self.scale() / scale };
        if factor != 1.0 {
            self.b.iter_mut().for_each(|b| *b = (f64::from(*b) * factor) as f32);
        }
        self.alpha = scale * self.rank as f64;
        self
    }

    /// The same delta with `rank` ranks, of which those beyond its own are zeros.
    ///
    /// # Panics
    /// When `rank` is below its own.
    #[must_use]
    pub fn with_rank(mut self, rank: usize) -> Self {
        let inputs = self.a.len() / self.rank;
        let alpha = self.scale() * rank as f64;
        let wider = |row: &[f32]| row.iter().copied().chain(vec![0.0; rank - row.len()]).collect::<Vec<_>>();
        self.a.resize(rank * inputs, 0.0);
        self.b = self.b.chunks_exact(self.rank).flat_map(wider).collect();
        Self { rank, alpha, ..self }
    }
}

/// The deltas of an adapter that is nothing but low-rank deltas of modules, in the order layer, site, part. Vectors
/// along ranks and columns (as those of VeRA) are multiplied into A and B.
///
/// # Errors
/// [`Error::NotPlain`] with the first thing that is no such delta; [`Error::ValueCount`] for a store of another length.
pub fn plain_loras(part: &FoldPart, base: &BaseDescription) -> Result<Vec<PlainLora>> {
    let FoldPart { set, values, .. } = *part;
    crate::peft::check_count("the flat store", values, set.layout.len)?;
    if let Some(what) = more_than_deltas(set) {
        return Err(Error::NotPlain { what });
    }
    let of = |lora: &Lora| plain(lora, part, base);
    let mut deltas: Vec<PlainLora> = set.loras.iter().map(of).collect();
    let order = |delta: &PlainLora| {
        let parts = &base.sites[delta.site].parts;
        let part = delta.part.as_ref().and_then(|name| parts.iter().position(|part| part.name == *name));
        (delta.layer, delta.site, part)
    };
    deltas.sort_by_key(order);
    Ok(deltas)
}

/// As [`plain_loras`], with the deltas of a module made one: A stacked, B in blocks of the columns of its parts.
///
/// # Errors
/// As [`plain_loras`].
pub fn whole_loras(part: &FoldPart, base: &BaseDescription) -> Result<Vec<PlainLora>> {
    let mut whole: Vec<Vec<PlainLora>> = Vec::new();
    for delta in plain_loras(part, base)? {
        match whole.last_mut().filter(|group| (group[0].layer, group[0].site) == (delta.layer, delta.site)) {
            Some(group) => group.push(delta),
            None => whole.push(vec![delta]),
        }
    }
    Ok(whole.into_iter().map(|group| fuse(group, base)).collect())
}

/// What a set has beside low-rank deltas of modules.
fn more_than_deltas(set: &AdapterSet) -> Option<&'static str> {
    let has_g = set.vectors.iter().any(|own| own.g.is_some_and(|g| g.over_norms));
    let scales = set.vectors.iter().any(|own| own.g.is_some() || own.u.is_some());
    match () {
        () if set.prefix.is_some() => Some("a prefix"),
        () if set.prompt.is_some() => Some("a prompt"),
        () if has_g => Some("magnitudes of columns (DoRA)"),
        () if scales => Some("vectors that scale modules (IA3)"),
        () if !set.vectors.is_empty() => Some("trained biases"),
        () if !set.norms.is_empty() => Some("trained layer norms"),
        () if set.embedding.is_some() => Some("a delta of the token embedding"),
        () => None,
    }
}

fn plain(lora: &Lora, part: &FoldPart, base: &BaseDescription) -> PlainLora {
    let tensor = |index: usize| &part.values[part.set.layout.tensors[index].range()];
    let (inputs, rank) = (base.sites[lora.site].inputs, lora.rank);
    let mut a = tensor(lora.a)[..rank * inputs].to_vec();
    let mut b = part.b(lora).to_vec();
    if let Some(d) = lora.d {
        for (row, d) in a.chunks_exact_mut(inputs).zip(tensor(d)) {
            row.iter_mut().for_each(|a| *a *= d);
        }
    }
    if let Some(e) = lora.e {
        for (row, e) in b.chunks_exact_mut(rank).zip(tensor(e)) {
            row.iter_mut().for_each(|b| *b *= e);
        }
    }
    let alpha = f64::from(part.factor) * alpha_of(lora);
    PlainLora { layer: lora.layer, site: lora.site, part: lora.part.clone(), rank, alpha, a, b }
}

/// The alpha whose quotient by the rank is the scale: the delta's own, unless its scale is another function of it.
fn alpha_of(lora: &Lora) -> f64 {
    let rank = lora.rank as f64;
    match (lora.alpha / rank, lora.alpha / rank.sqrt()) {
        (plain, _) if plain as f32 == lora.scale => lora.alpha,
        (_, root) if root as f32 == lora.scale => root * rank,
        _ => f64::from(lora.scale) * rank,
    }
}

fn fuse(mut group: Vec<PlainLora>, base: &BaseDescription) -> PlainLora {
    let (layer, site) = (group[0].layer, group[0].site);
    if group.len() == 1 && group[0].part.is_none() {
        return group.remove(0);
    }
    let (description, scale) = (&base.sites[site], group[0].scale());
    let rank = group.iter().map(|delta| delta.rank).sum();
    let mut fused = PlainLora {
        layer,
        site,
        part: None,
        rank,
        alpha: if group.iter().all(|delta| delta.scale() == scale) {
            group.iter().map(|delta| delta.alpha).sum()
        } else {
            scale * rank as f64
        },
        a: Vec::with_capacity(rank * description.inputs),
        b: vec![0.0; description.outputs * rank],
    };
    let mut first = 0;
    for delta in group {
        let delta = if delta.scale() == scale { delta } else { delta.with_scale(scale) };
        let start = delta.part.as_ref().and_then(|name| {
            description.parts.iter().find(|part| part.name == *name).map(|part| part.columns.start)
        });
        let rows = fused.b.chunks_exact_mut(rank).skip(start.unwrap_or_default());
        for (row, from) in rows.zip(delta.b.chunks_exact(delta.rank)) {
            row[first..first + delta.rank].copy_from_slice(from);
        }
        fused.a.extend(&delta.a);
        first += delta.rank;
    }
    fused
}

/// An adapter made of `deltas`, which were read from the file `path`; every one that does not fit `base` is named.
///
/// # Errors
/// [`Error::Mismatch`] with every delta of other sizes than its module, out of range, or not finite; [`Error::Empty`]
/// without deltas; those of [`AdapterSet::new`].
pub fn from_plain(
    deltas: Vec<PlainLora>,
    dropout: f64,
    path: &Path,
    base: &BaseDescription,
) -> Result<Loaded> {
    let Some(first) = deltas.first() else { return Err(Error::Empty) };
    let problems: Vec<Problem> = deltas.iter().flat_map(|delta| problems_of(delta, base)).collect();
    if !problems.is_empty() {
        return Err(Error::Mismatch { path: path.to_owned(), problems });
    }
    let usual = LoraSpec { rank: first.rank, alpha: first.alpha, dropout, ..LoraSpec::default() };
    let rank_pattern = deltas.iter().filter(|delta| delta.rank != first.rank);
    let alpha_pattern = deltas.iter().filter(|delta| delta.alpha != first.alpha);
    let module = |delta: &PlainLora| base.sites[delta.site].module(delta.layer);
    let spec = LoraSpec {
        rank_pattern: rank_pattern.map(|delta| (module(delta), delta.rank)).collect::<BTreeMap<_, _>>(),
        alpha_pattern: alpha_pattern.map(|delta| (module(delta), delta.alpha)).collect(),
        ..usual
    };
    let set = choosing(&deltas, spec, base)?;
    let mut values = vec![0.0; set.layout.len];
    for delta in &deltas {
        let place =
            |lora: &&Lora| (lora.layer, lora.site, &lora.part) == (delta.layer, delta.site, &delta.part);
        let Some(lora) = set.loras.iter().find(place) else { continue };
        values[set.layout.tensors[lora.a].range()].copy_from_slice(&delta.a);
        values[set.layout.tensors[lora.b].range()].copy_from_slice(&delta.b);
    }
    Ok(Loaded { set, values, hints: Vec::new() })
}

/// `spec` resolved with targets that choose the places of `deltas` and no others: names and layers where they can say
/// it, else full paths.
fn choosing(deltas: &[PlainLora], spec: LoraSpec, base: &BaseDescription) -> Result<AdapterSet> {
    let named = |module: String, delta: &PlainLora| match &delta.part {
        Some(part) => format!("{module}.{part}"),
        None => module,
    };
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names.dedup();
        Targets::List(names)
    };
    let mut layers: Vec<usize> = deltas.iter().map(|delta| delta.layer).collect();
    layers.sort_unstable();
    layers.dedup();
    let by_name = deltas.iter().map(|delta| named(base.sites[delta.site].name.clone(), delta));
    let by_name = LoraSpec {
        targets: sorted(by_name.collect()),
        layers: (layers.len() < base.layers).then_some(layers),
        ..spec.clone()
    };
    let places = |mut places: Vec<(usize, usize, Option<String>)>| {
        places.sort();
        places
    };
    let wanted = places(deltas.iter().map(|delta| (delta.layer, delta.site, delta.part.clone())).collect());
    if let Some(twice) = wanted.windows(2).find(|pair| pair[0] == pair[1]) {
        let module = base.sites[twice[0].1].module(twice[0].0);
        let why = format!("two deltas are for {module}; save the adapter again");
        return Err(Error::NotCombinable { why });
    }
    let found = |set: &AdapterSet| {
        places(set.loras.iter().map(|lora| (lora.layer, lora.site, lora.part.clone())).collect())
    };
    match AdapterSet::new(&by_name.into(), base) {
        Ok(set) if found(&set) == wanted => Ok(set),
        // Names choose too much, perhaps a module and a part of it.
        _ => {
            let by_path = deltas.iter().map(|delta| named(base.sites[delta.site].module(delta.layer), delta));
            AdapterSet::new(&LoraSpec { targets: sorted(by_path.collect()), ..spec }.into(), base)
        }
    }
}

fn problems_of(delta: &PlainLora, base: &BaseDescription) -> Vec<Problem> {
    let Some(site) = base.sites.get(delta.site) else { return Vec::new() };
    if delta.layer >= base.layers {
        return vec![Problem::Layers { found: delta.layer + 1, expected: base.layers }];
    }
    let columns = delta.part.as_ref().and_then(|name| site.parts.iter().find(|part| part.name == *name));
    let columns = columns.map_or(site.outputs, |part| part.columns.len());
    let module = site.module(delta.layer);
    let tensors = [("A", &delta.a, [delta.rank, site.inputs]), ("B", &delta.b, [columns, delta.rank])];
    let mut problems = Vec::new();
    for (name, values, expected) in tensors {
        let tensor = format!("{name} of {module}");
        if values.len() != expected.iter().product::<usize>() {
            let found: Cow<[usize]> = match name {
                "A" => vec![delta.rank, values.len() / delta.rank.max(1)].into(),
                _ => vec![values.len() / delta.rank.max(1), delta.rank].into(),
            };
            let (found, expected) = (found.into_owned(), expected.to_vec());
            problems.push(Problem::Shape { tensor, found, expected });
        } else if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            problems.push(Problem::NotFinite { tensor, index });
        }
    }
    problems
}

#[cfg(test)]
#[path = "plain_tests.rs"]
mod tests;
