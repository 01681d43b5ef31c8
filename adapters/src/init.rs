//! Initial values, as PEFT 0.21.2 and PyTorch draw them, from the counter-based generator.
//!
//! - LoRA: A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)), which is `kaiming_uniform_(a=sqrt(5))`; B = 0.
//! - Prefix: N(0, 1), as `torch.nn.Embedding`, in PEFT's `PrefixEncoder`.
//! - Projection: its embedding N(0, 1); weight and bias of its two linear layers
//!   U(-1/sqrt(inputs), 1/sqrt(inputs)), as `torch.nn.Linear`.
//!
//! Each tensor draws from a stream named by the seed and its own name: a tensor starts the same
//! whatever else is adapted.

use engraft_util::rng;

use crate::{AdapterSet, PrefixValues, TensorSlot};

impl AdapterSet {
    /// Initial values of the flat store, `layout.len` of them. The same seed gives the same values.
    pub fn init(&self, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; self.layout.len];
        for lora in &self.loras {
            let a = &self.layout.tensors[lora.a];
            uniform(&mut values, a, a.shape[1], seed);
        }
        match self.prefix.as_ref().map(|prefix| &prefix.values) {
            None => {}
            Some(&PrefixValues::Direct { prompt }) => normal(&mut values, &self.layout.tensors[prompt], seed),
            Some(&PrefixValues::Projected {
                hidden,
                embedding,
                in_weight,
                in_bias,
                out_weight,
                out_bias,
            }) => {
                let slots = &self.layout.tensors;
                let width = slots[embedding].shape[1];
                normal(&mut values, &slots[embedding], seed);
                uniform(&mut values, &slots[in_weight], width, seed);
                uniform(&mut values, &slots[in_bias], width, seed);
                uniform(&mut values, &slots[out_weight], hidden, seed);
                uniform(&mut values, &slots[out_bias], hidden, seed);
            }
        }
        values
    }
}

/// U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
fn uniform(values: &mut [f32], slot: &TensorSlot, fan_in: usize, seed: u64) {
    let bound = 1.0 / (fan_in as f32).sqrt();
    fill(values, slot, seed, |key, index| (2.0 * rng::uniform(key, index) - 1.0) * bound);
}

/// N(0, 1).
fn normal(values: &mut [f32], slot: &TensorSlot, seed: u64) {
    fill(values, slot, seed, rng::normal);
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
        AdapterSet::new(&AdapterSpec { lora, prefix }, &testing::base()).unwrap()
    }

    fn of<'a>(set: &AdapterSet, values: &'a [f32], slot: usize) -> &'a [f32] {
        &values[set.layout.tensors[slot].range()]
    }

    #[test]
    fn a_is_uniform_within_the_bound_and_b_is_zero() {
        let set = set(Some(LoraSpec { rank: 64, ..LoraSpec::default() }), None);
        let values = set.init(3);
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
        assert_eq!(few.init(5)[..slot.len()], many.init(5)[slot.range()]);
        assert_ne!(few.init(5), few.init(6));
        assert_eq!(many.init(5), many.init(5));
    }

    #[test]
    fn a_prefix_is_standard_normal_and_a_projection_is_all_drawn() {
        let direct = set(None, Some(PrefixSpec { length: 20, projection: None })).init(1);
        let variance = direct.iter().map(|x| x * x).sum::<f32>() / direct.len() as f32;
        assert!((variance - 1.0).abs() < 0.1, "{variance}");
        let projected = set(None, Some(PrefixSpec { length: 5, projection: Some(7) })).init(1);
        assert!(projected.iter().all(|&x| x != 0.0));
    }
}
