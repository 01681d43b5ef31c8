//! VeRA: low-rank deltas whose factors are frozen, random and shared, with learned vectors (Kopiczko et al. 2024,
//! arXiv:2310.11454).
//!
//! A module is `y = x W + b + lambda_b * (((drop(x) A^T) * lambda_d) B^T)`. A `[rank, largest inputs]` and B
//! `[largest outputs, rank]` are those of all modules, each of which reads the first columns of A and the first rows of B.
//!
//! Initial values: `lambda_d` as asked for, `lambda_b` 0, so that the adapter starts as the base alone; A and B uniform in
//! ±sqrt(6 / fan in), from the numbers that PyTorch draws with the same key.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Group, Lora, Result, Targets, TensorSlot,
    init::Init,
    layout::Slots,
    mersenne::MersenneTwister,
    peft::{
        self, Fields, Files, Findings, MODULE_PREFIX, TensorFile,
        modules::modules,
        selection::{Selection, check_layers, target_fields},
    },
    set::layer_ranges,
    targets::{self, Selected},
};

/// A in the file, [rank, largest inputs].
const A: &str = "base_model.vera_A";
/// B in the file, [largest outputs, rank].
const B: &str = "base_model.vera_B";

/// A VeRA: `y = x W + b + lambda_b * (((drop(x) A^T) * lambda_d) B^T)` with frozen A and B.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VeraSpec {
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Modules it attaches to.
    pub targets: Targets,
    /// Layers it attaches to; `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Probability in [0, 1) that an input element of the delta is dropped.
    pub dropout: f64,
    /// Initial value of every element of lambda_d.
    pub d_initial: f64,
    /// Seed of A and B, as PyTorch's generator takes it. It is not the seed of a run: adapters of one key share A and B.
    pub projection_prng_key: u64,
}

impl Default for VeraSpec {
    fn default() -> Self {
        Self {
            rank: 256,
            targets: Targets::List(vec!["c_attn".to_owned()]),
            layers: None,
            dropout: 0.0,
            d_initial: 0.1,
            projection_prng_key: 0,
        }
    }
}

/// The slice of A for modules of fewer inputs than the widest: kept beside A, and not in the file.
fn slice_of_a(inputs: usize) -> String {
    format!("{A}[:, :{inputs}]")
}

/// Whether the file has the tensor.
fn is_stored(slot: &TensorSlot) -> bool {
    !slot.name.ends_with(']')
}

impl VeraSpec {
    /// The kind `vera`.
    pub const KIND: Kind = Kind { name: "vera", peft_type: "VERA", claims: |_| true, read: StoredVera::read };

    /// The modules it attaches to.
    ///
    /// # Errors
    /// When a name matches nothing, a part of a module is meant, or a value is out of range.
    fn chosen(&self, base: &BaseDescription) -> Result<Vec<Selected>> {
        if self.rank == 0 {
            return Err(Error::ZeroRank { option: "rank".to_owned() });
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::Dropout { value: self.dropout });
        }
        if !(self.d_initial as f32).is_finite() {
            return Err(Error::DInitial { value: self.d_initial });
        }
        targets::whole_modules(&self.targets, self.layers.as_deref(), Self::KIND.name, base)
    }

    /// Writes A and B into the flat store, and after them the slices of A.
    fn draw(&self, set: &AdapterSet, values: &mut [f32]) {
        let mut numbers = MersenneTwister::new(self.projection_prng_key);
        for name in [A, B] {
            let Some(slot) = set.layout.slot(name) else { continue };
            let bound = (6.0 / slot.shape[1] as f64).sqrt();
            values[slot.range()].fill_with(|| numbers.uniform(-bound, bound));
        }
        slice(set, values);
    }
}

/// Fills the slices of A from A.
fn slice(set: &AdapterSet, values: &mut [f32]) {
    let Some(whole) = set.layout.slot(A) else { return };
    let own = |slot: &&TensorSlot| slot.method == VeraSpec::KIND.name && !is_stored(slot);
    for slot in set.layout.tensors.iter().filter(own) {
        let (widest, inputs) = (whole.shape[1], slot.shape[1]);
        for row in 0..slot.shape[0] {
            let from = whole.offset + row * widest;
            values.copy_within(from..from + inputs, slot.offset + row * inputs);
        }
    }
}

impl Method for VeraSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let (rank, chosen) = (self.rank, self.chosen(base)?);
        let most = |of: fn(&crate::SiteDescription) -> usize| {
            chosen.iter().map(|one| of(&base.sites[one.site])).max().unwrap_or_default()
        };
        let (inputs, outputs) = (most(|site| site.inputs), most(|site| site.outputs));
        let whole = slots.push_to(Group::FROZEN, A, &[rank, inputs])?;
        let b = slots.push_to(Group::FROZEN, B, &[outputs, rank])?;
        let mut loras = Vec::new();
        for one in chosen {
            let site = &base.sites[one.site];
            let a = match site.inputs == inputs {
                true => whole,
                false => slots.push_to(Group::FROZEN, slice_of_a(site.inputs), &[rank, site.inputs])?,
            };
            let path = format!("{MODULE_PREFIX}{}", one.path(base));
            let e = slots.push(format!("{path}.vera_lambda_b"), &[site.outputs])?;
            let d = slots.push(format!("{path}.vera_lambda_d"), &[rank])?;
            let (layer, site, columns) = (one.layer, one.site, 0..site.outputs);
            let (d, e) = (Some(d), Some(e));
            loras.push(Lora { layer, site, part: None, columns, rank, alpha: 1.0, scale: 1.0, a, b, d, e });
        }
        Ok(Contribution { loras, ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], _: &Init) -> Result<()> {
        for lora in set.loras_of(&Self::KIND) {
            let d = lora.d.map(|d| set.layout.tensors[d].range()).unwrap_or_default();
            values[d].fill(self.d_initial as f32);
        }
        self.draw(set, values);
        Ok(())
    }

    fn dropout(&self) -> Option<f64> {
        Some(self.dropout)
    }

    /// A line per site: `attn.c_attn: layers 0-11`.
    fn matched(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        let line = |(number, site): (usize, &crate::SiteDescription)| {
            let own = set.loras_of(&Self::KIND).filter(|lora| lora.site == number);
            let layers: Vec<usize> = own.map(|lora| lora.layer).collect();
            (!layers.is_empty()).then(|| format!("{}: {}", site.name, layer_ranges(&layers)))
        };
        base.sites.iter().enumerate().filter_map(line).collect()
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![
            ("kind", format!("vera, rank {}, projections of key {}", self.rank, self.projection_prng_key)),
            ("targets", self.targets.to_string()),
        ]
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let fields = [
            ("bias", json!("none")),
            ("d_initial", peft::number(self.d_initial)),
            ("fan_in_fan_out", json!(base.sites.iter().any(|site| site.fan_in_fan_out))),
            ("init_weights", json!(true)),
            ("layers_pattern", Value::Null),
            ("modules_to_save", Value::Null),
            ("projection_prng_key", json!(self.projection_prng_key)),
            ("r", json!(self.rank)),
            ("save_projection", json!(true)),
            ("vera_dropout", peft::number(self.dropout)),
        ];
        let modules = modules(set, &Self::KIND, false, base);
        let targets = target_fields(&self.targets, self.layers.as_deref(), &modules, false, false, base);
        let config = peft::config_text(&Self::KIND, base, fields.into_iter().chain(targets));
        let own = set.layout.tensors.iter().filter(|slot| slot.method == Self::KIND.name && is_stored(slot));
        Ok(Files::of(config, own, values, base))
    }

    fn read(
        &self,
        set: &AdapterSet,
        _: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        // A file without A and B has what the key gives.
        self.draw(set, values);
        findings.read_plain(tensors, set, values)?;
        slice(set, values);
        Ok(())
    }
}

/// A VeRA as its config has it.
#[derive(Debug)]
struct StoredVera {
    spec: VeraSpec,
    selection: Selection,
    /// Whether the file has A and B.
    has_projections: bool,
}

impl StoredVera {
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        fields.require("bias", &["none"]);
        let usual = VeraSpec::default();
        let rank = fields.need("r", "a whole number from 1 is expected");
        let selection = Selection::read(fields);
        let dropout = fields.take("vera_dropout", "a number in [0, 1) is expected").unwrap_or(usual.dropout);
        let d_initial = fields.take("d_initial", "a number is expected").unwrap_or(usual.d_initial);
        let key = fields.take("projection_prng_key", "a whole number is expected");
        let saved = fields.take("save_projection", "true or false is expected").unwrap_or(true);
        let (rank, selection) = (rank?, selection?);
        let (targets, layers) = (selection.targets.clone(), selection.layers.clone());
        let projection_prng_key = key.unwrap_or(usual.projection_prng_key);
        let spec = VeraSpec { rank, targets, layers, dropout, d_initial, projection_prng_key };
        Some(Box::new(Self { spec, selection, has_projections: saved }))
    }
}

impl Stored for StoredVera {
    fn kind(&self) -> &'static Kind {
        &VeraSpec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        self.spec.clone().into()
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        self.selection.check_pattern(base, findings);
        let (targets, layers, idle) = self.selection.as_peft_matches(base, findings);
        if !idle.is_empty() {
            let names = idle.join(", ");
            findings.hints.push(format!("the config's {names} applies to no module of this base"));
        }
        if !self.has_projections {
            let key = self.spec.projection_prng_key;
            findings.hints.push(format!(
                "the adapter was saved without its projections; they are those of projection_prng_key {key}"
            ));
        }
        check_layers(&targets, layers.as_deref(), tensors, base, findings);
        let spec = VeraSpec { targets, layers, ..self.spec.clone() };
        let set = findings.accept(AdapterSet::new(&spec.into(), base))?;
        let is_in_file = |slot: &&TensorSlot| {
            is_stored(slot) && (self.has_projections || ![A, B].contains(&slot.name.as_str()))
        };
        let expected: Vec<&TensorSlot> = set.layout.tensors.iter().filter(is_in_file).collect();
        expected.iter().for_each(|slot| findings.tensor(tensors, slot.name.clone(), &slot.shape));
        findings.extras(tensors, &expected.iter().map(|slot| slot.name.clone()).collect::<Vec<_>>());
        Some(set)
    }
}

#[cfg(test)]
#[path = "vera_tests.rs"]
mod tests;
