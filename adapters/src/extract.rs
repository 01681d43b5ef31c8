//! LoRAs that come closest to given changes of weights, such as those of a full fine-tuning.

use crate::{
    AdapterSet, BaseDescription, Error, Result,
    combine::spec_of,
    svd::{Matrix, Svd, dot},
};

/// A LoRA of the changes of some modules.
#[derive(Debug)]
pub struct Extracted {
    /// The LoRA, resolved; its scale is 1.
    pub set: AdapterSet,
    /// Its flat store.
    pub values: Vec<f32>,
    /// Layer and site of each module, the square of the norm of its change, and that of what the rank does not hold.
    pub modules: Vec<((usize, usize), f64, f64)>,
}

/// The LoRA of `rank` that is closest to the changes of modules, by their singular values. `places` are their layers
/// and sites in order; `change` gives each [inputs, outputs].
///
/// # Errors
/// The error of `change`, and those of [`AdapterSet::new`].
pub fn extract<E: From<Error>>(
    places: &[(usize, usize)],
    rank: usize,
    base: &BaseDescription,
    change: &mut dyn FnMut(usize, usize) -> Result<Vec<f32>, E>,
) -> Result<Extracted, E> {
    let set = AdapterSet::new(&spec_of(places, rank, 0.0, base).into(), base)?;
    let mut values = vec![0.0; set.layout.len];
    let mut modules = Vec::new();
    for lora in &set.loras {
        let site = &base.sites[lora.site];
        let change = change(lora.layer, lora.site)?;
        // The transpose: A and B are for [outputs, inputs].
        let change = Matrix::new(site.inputs, site.outputs, change.into_iter().map(f64::from).collect());
        let svd = Svd::leading(&change, rank).swapped();
        let (b, a) = svd.factors(rank);
        values[set.layout.tensors[lora.a].range()].copy_from_slice(&a);
        values[set.layout.tensors[lora.b].range()].copy_from_slice(&b);
        let square = |values: &[f64]| dot(values, values);
        let whole = square(&change.values);
        // Rounding may leave less than nothing of a change that the rank holds as a whole.
        let lost = (whole - square(&svd.values)).max(0.0);
        modules.push(((lora.layer, lora.site), whole, lost));
    }
    Ok(Extracted { set, values, modules })
}

#[cfg(test)]
mod tests {
    use engraft_util::rng;

    use super::*;
    use crate::{FoldPart, Folding, LoraSpec, testing};

    #[test]
    fn a_lora_is_extracted_from_the_changes_it_made() {
        let base = testing::base();
        let spec = LoraSpec { rank: 3, targets: "c_attn,mlp.c_proj".parse().unwrap(), ..LoraSpec::default() };
        let set = AdapterSet::new(&spec.into(), &base).unwrap();
        let draw = |at: usize| rng::normal(rng::key(&[9]), at as u64);
        let values: Vec<f32> = (0..set.layout.len).map(draw).collect();
        let part = FoldPart { set: &set, values: &values, factor: 1.0 };
        let written_out = |part: FoldPart, layer: usize, site: usize| {
            let (inputs, outputs) = (base.sites[site].inputs, base.sites[site].outputs);
            let mut weight = vec![0.0; inputs * outputs];
            let folding = Folding::new(vec![part]).unwrap();
            folding.linear(layer, site, &mut weight, &mut vec![0.0; outputs]);
            weight
        };
        let places = [(0, 0), (1, 3)];
        let of = |rank| {
            let mut change = |layer, site| Ok(written_out(part, layer, site));
            extract::<Error>(&places, rank, &base, &mut change).unwrap()
        };
        let whole = of(3);
        assert!(whole.modules.iter().all(|(_, whole, lost)| *whole > 0.1 && *lost < 1e-10 * whole));
        let found = FoldPart { set: &whole.set, values: &whole.values, factor: 1.0 };
        for (layer, site) in places {
            let (found, expected) = (written_out(found, layer, site), written_out(part, layer, site));
            let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 2e-6 * largest));
        }
        assert!(of(2).modules.iter().all(|(_, whole, lost)| (0.001..0.5).contains(&(lost / whole))));
    }
}
