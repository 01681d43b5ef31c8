//! LoRAs written in the layouts of loralib and of mlx-lm.

use std::{collections::BTreeMap, path::Path};

use engraft_adapters::{BaseDescription, PlainLora};
use engraft_util::{
    atomic::{self, WriteError},
    safetensors::{Entry, Order, header},
};
use safetensors::Dtype;
use serde_json::json;

use super::pickle::{StateTensor, write_state_dict};
use crate::error::{Error, Result};

/// How a user of loralib has to make the layers of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct LoralibLayers {
    /// Bytes of the file.
    pub bytes: u64,
    /// For each kind of module its name, the class of loralib, rank, alpha, and whether each part has a delta; without
    /// parts the list is empty.
    pub layers: Vec<LoralibLayer>,
}

/// The layers of loralib that stand for one module, in all layers of the base.
#[derive(Debug, Clone, PartialEq)]
pub struct LoralibLayer {
    /// Name of the module in a layer.
    pub module: String,
    /// Its rank.
    pub rank: usize,
    /// Its `lora_alpha`.
    pub alpha: f64,
    /// `enable_lora` of a `MergedLinear`; empty for a `Linear`.
    pub enable_lora: Vec<bool>,
}

/// Writes `deltas` (those of parts apart) as a state dict of loralib's layers: a `Linear` for a whole module, a
/// `MergedLinear` for parts.
///
/// # Errors
/// [`Input`](Error::Input) where a module's parts have deltas of several ranks or alphas, or a module has them otherwise in
/// other layers; [`Failed`](Error::Failed) when the file cannot be written.
pub fn write_loralib(output: &Path, deltas: &[PlainLora], base: &BaseDescription) -> Result<LoralibLayers> {
    let mut groups: BTreeMap<(usize, usize), Vec<&PlainLora>> = BTreeMap::new();
    deltas.iter().for_each(|delta| groups.entry((delta.layer, delta.site)).or_default().push(delta));
    let (mut layers, mut stacked) = (BTreeMap::<usize, LoralibLayer>::new(), Vec::new());
    for (&(layer, site), group) in &groups {
        let site_of = &base.sites[site];
        let found = LoralibLayer {
            module: site_of.name.clone(),
            rank: group[0].rank,
            alpha: group[0].alpha,
            enable_lora: site_of
                .parts
                .iter()
                .map(|part| group.iter().any(|delta| delta.part.as_deref() == Some(part.name.as_str())))
                .collect(),
        };
        let whole = group[0].part.is_none();
        let found = if whole { LoralibLayer { enable_lora: Vec::new(), ..found } } else { found };
        let same = group.iter().all(|delta| delta.rank == found.rank && delta.alpha == found.alpha);
        if !same || layers.entry(site).or_insert_with(|| found.clone()) != &found {
            return Err(Error::input(format!(
                "--to loralib: {} has deltas of several ranks, alphas or choices of parts, and loralib's layers are made with \
                 one of each; export it --to peft",
                site_of.module(layer)
            )));
        }
        let module = site_of.module(layer);
        let all =
            |tensor: fn(&PlainLora) -> &[f32]| group.iter().flat_map(move |delta| tensor(delta)).copied();
        let a: Vec<f32> = all(|delta| &delta.a).collect();
        let b: Vec<f32> = all(|delta| &delta.b).collect();
        stacked.push((format!("{module}.lora_A"), vec![a.len() / site_of.inputs, site_of.inputs], a));
        stacked.push((format!("{module}.lora_B"), vec![b.len() / found.rank, found.rank], b));
    }
    let tensors = stacked.iter().map(|(name, shape, values)| StateTensor {
        name: name.clone(),
        shape: shape.clone(),
        values,
    });
    let bytes = write_state_dict(output, &tensors.collect::<Vec<_>>())?;
    Ok(LoralibLayers { bytes, layers: layers.into_values().collect() })
}

/// Writes `deltas`, one for each module, as a folder of mlx-lm: one rank and one scale for all modules, those of fewer ranks
/// padded with zeros. `dropout` is that of training.
///
/// # Errors
/// When the folder cannot be written.
pub fn write_mlx(output: &Path, deltas: Vec<PlainLora>, dropout: f64, base: &BaseDescription) -> Result<()> {
    let rank = deltas.iter().map(|delta| delta.rank).max().unwrap_or(1);
    let scale = deltas.iter().map(PlainLora::scale).find(|scale| *scale != 0.0).unwrap_or(1.0);
    let lowest = deltas.iter().map(|delta| delta.layer).min().unwrap_or_default();
    let mut keys: Vec<&str> = deltas.iter().map(|delta| base.sites[delta.site].name.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    let config = json!({
        "fine_tune_type": "lora",
        "lora_parameters": { "rank": rank, "scale": scale, "dropout": dropout, "keys": keys },
        "model": base.name,
        // Counted from the last layer.
        "num_layers": base.layers - lowest,
    });
    let mut tensors = BTreeMap::new();
    for delta in deltas {
        let delta = if delta.scale() == scale { delta } else { delta.with_scale(scale) };
        let delta = delta.with_rank(rank);
        let site = &base.sites[delta.site];
        let module = format!("model.h.{}.{}", delta.layer, site.name);
        tensors.insert(format!("{module}.lora_a"), ([site.inputs, rank], transposed(&delta.a, site.inputs)));
        tensors.insert(format!("{module}.lora_b"), ([rank, site.outputs], transposed(&delta.b, rank)));
    }
    let entries: Vec<Entry> = tensors
        .iter()
        .map(|(name, (shape, values))| Entry {
            name: name.clone(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes: 4 * values.len(),
        })
        .collect();
    let head = header(&[("format", "mlx")].into(), &entries, Order::Given, 8);
    let head = head.map_err(|cause| WriteError::new(output, cause))?;
    let text = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";
    Ok(atomic::replace_folder(output, &[], |fresh| {
        atomic::create(&fresh.join("adapters.safetensors"), |out| {
            out.write_all(&head)?;
            for (_, values) in tensors.values() {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                out.write_all(&bytes)?;
            }
            Ok(())
        })?;
        atomic::create(&fresh.join("adapter_config.json"), |out| out.write_all(text.as_bytes()))
    })?)
}

/// `values` in rows of `columns` as its columns.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns)).copied().collect()
}
