//! Initial values, as PEFT 0.21.2 and PyTorch draw them, from the counter-based generator.
//!
//! Each tensor draws from a stream keyed by the seed and its own name, so its initial values do not depend on
//! the rest of the adapter. Each method's file defines its own initial values.

use engraft_util::rng;

use crate::{AdapterSet, BaseWeights, Error, NormWeights, Result, TensorSlot};

/// Inputs of the initial values.
pub(crate) struct Init<'a> {
    /// Seed of the random numbers.
    pub seed: u64,
    weights: Option<&'a dyn BaseWeights>,
}

impl<'a> Init<'a> {
    /// Weight `[inputs, outputs]` of a site of a layer, for `method`.
    ///
    /// # Errors
    /// [`Error::WeightsNeeded`] if the base's weights are not available.
    pub fn matrix(&self, method: &'static str, site: usize, layer: usize) -> Result<Vec<f32>> {
        let found = self.weights.and_then(|weights| weights.matrix(site, layer));
        found.ok_or(Error::WeightsNeeded { method })
    }

    /// Norms `[outputs]` of the columns of the weight of a site of a layer, for `method`.
    ///
    /// # Errors
    /// As [`Init::matrix`].
    pub fn column_norms(&self, method: &'static str, site: usize, layer: usize) -> Result<Vec<f32>> {
        let found = self.weights.and_then(|weights| weights.column_norms(site, layer));
        found.ok_or(Error::WeightsNeeded { method })
    }

    /// Bias `[outputs]` of a site of a layer, for `method`.
    ///
    /// # Errors
    /// As [`Init::matrix`].
    pub fn bias(&self, method: &'static str, site: usize, layer: usize) -> Result<Vec<f32>> {
        let found = self.weights.and_then(|weights| weights.bias(site, layer));
        found.ok_or(Error::WeightsNeeded { method })
    }

    /// Gain and bias of a layer norm, as [`BaseWeights::norm`] names it, for `method`.
    ///
    /// # Errors
    /// As [`Init::matrix`].
    pub fn norm(&self, method: &'static str, layer: Option<usize>, norm: usize) -> Result<NormWeights> {
        let found = self.weights.and_then(|weights| weights.norm(layer, norm));
        found.ok_or(Error::WeightsNeeded { method })
    }

    /// Rows `[ids, width]` of the token embedding, for `method`.
    ///
    /// # Errors
    /// As [`Init::matrix`].
    #[cfg_attr(not(test), expect(dead_code, reason = "no method without tests looks at weights yet"))]
    pub fn token_embeddings(&self, method: &'static str, ids: &[u32]) -> Result<Vec<f32>> {
        let found = self.weights.and_then(|weights| weights.token_embeddings(ids));
        found.ok_or(Error::WeightsNeeded { method })
    }

    /// U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
    pub fn uniform(&self, values: &mut [f32], slot: &TensorSlot, fan_in: usize) {
        let bound = 1.0 / (fan_in as f32).sqrt();
        fill(values, slot, self.seed, |key, index| (2.0 * rng::uniform(key, index) - 1.0) * bound);
    }

    /// Fills `values` of the slot from the normal distribution with mean 0 and standard deviation 1.
    pub fn normal(&self, values: &mut [f32], slot: &TensorSlot) {
        fill(values, slot, self.seed, rng::normal);
    }
}

impl AdapterSet {
    /// Initial values of the flat store, `layout.len` of them. The same seed gives the same values.
    ///
    /// # Errors
    /// [`Error::WeightsNeeded`] for a method that looks at the base's weights.
    pub fn init(&self, seed: u64) -> Result<Vec<f32>> {
        self.init_from(seed, None)
    }

    /// Initial values of the flat store, of which some may follow from `weights`.
    ///
    /// # Errors
    /// [`Error::WeightsNeeded`] for a method that looks at weights that are not there.
    pub fn init_from(&self, seed: u64, weights: Option<&dyn BaseWeights>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.layout.len];
        for method in self.spec.methods() {
            method.init(self, &mut values, &Init { seed, weights })?;
        }
        Ok(values)
    }
}

fn fill(values: &mut [f32], slot: &TensorSlot, seed: u64, draw: impl Fn(u64, u64) -> f32) {
    let key = rng::key(&[seed, rng::name(&slot.name)]);
    for (index, value) in values[slot.range()].iter_mut().enumerate() {
        *value = draw(key, index as u64);
    }
}

#[cfg(test)]
mod tests {
    use crate::{AdapterSet, AdapterSpec, LoraSpec, PrefixSpec, testing};

    fn set(lora: Option<LoraSpec>, prefix: Option<PrefixSpec>) -> AdapterSet {
        AdapterSet::new(&AdapterSpec { lora, prefix, ..AdapterSpec::default() }, &testing::base()).unwrap()
    }

    fn of<'a>(set: &AdapterSet, values: &'a [f32], slot: usize) -> &'a [f32] {
        &values[set.layout.tensors[slot].range()]
    }

    #[test]
    fn a_is_uniform_within_the_bound_and_b_is_zero() {
        let set = set(Some(LoraSpec { rank: 64, ..LoraSpec::default() }), None);
        let values = set.init(3).unwrap();
        for lora in &set.loras {
            let a = of(&set, &values, lora.a);
            let bound = 1.0 / (set.layout.tensors[lora.a].shape[1] as f32).sqrt();
            assert!(a.iter().all(|x| x.abs() <= bound));
            let variance = a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32;
            let expected = bound * bound / 3.0;
            assert!((variance / expected - 1.0).abs() < 0.2, "{variance} {expected}");
            assert!(of(&set, &values, lora.b).iter().all(|&x| x == 0.0));
        }
    }

    #[test]
    fn a_tensor_starts_the_same_whatever_else_is_adapted() {
        let few = set(Some(LoraSpec { layers: Some(vec![1]), ..LoraSpec::default() }), None);
        let many = set(Some(LoraSpec::default()), Some(PrefixSpec::default()));
        let slot = many.layout.slot(&few.layout.tensors[0].name).unwrap();
        assert_eq!(few.init(5).unwrap()[..slot.len()], many.init(5).unwrap()[slot.range()]);
        assert_ne!(few.init(5).unwrap(), few.init(6).unwrap());
        assert_eq!(many.init(5).unwrap(), many.init(5).unwrap());
    }

    #[test]
    fn a_prefix_is_standard_normal_and_a_projection_is_all_drawn() {
        let direct = set(None, Some(PrefixSpec { length: 20, projection: None })).init(1).unwrap();
        let variance = direct.iter().map(|x| x * x).sum::<f32>() / direct.len() as f32;
        assert!((variance - 1.0).abs() < 0.1, "{variance}");
        let projected = set(None, Some(PrefixSpec { length: 5, projection: Some(7) })).init(1).unwrap();
        assert!(projected.iter().all(|&x| x != 0.0));
    }
}
