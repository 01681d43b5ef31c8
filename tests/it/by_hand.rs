//! Adapter sets made by hand, tensor by tensor, with any part that a model has room for, and trainings of them.

use std::sync::Arc;

use engraft::{
    engine::Trainer,
    model::{Base, BaseDType, Policy, Recompute},
};
use engraft_adapters::{
    AdapterSet, AdapterSpec, Group, Layout, Lora, NormVectors, OutputScale, SiteVectors, TensorSlot,
};
use engraft_util::rng;

use crate::{
    autograd, policies,
    setup::{Case, RandomBase, Sizes, TrainerState, bits, by_tensor, lora, random_base, state, wide, within},
};

/// Sizes of [`base`]: odd ones, and layers without anything trained.
pub const SIZES: Sizes = Sizes { layers: 3, heads: 2, width: 10, inner: 14, positions: 13, vocab: 61 };
/// Bounds of docs/NUMERICS.md.
pub const LOGITS: f64 = 5e-6;
pub const LOSS: f64 = 2e-6;
pub const CHUNKS: f64 = 5e-6;

/// The base that sets made by hand are tried on.
pub fn base() -> RandomBase {
    random_base(SIZES, "gelu_new")
}

/// A set that grows tensor by tensor, with its values.
#[derive(Default)]
pub struct ByHand {
    layout: Layout,
    values: Vec<f32>,
    loras: Vec<Lora>,
    vectors: Vec<SiteVectors>,
    norms: Vec<NormVectors>,
}

impl ByHand {
    pub fn tensor(&mut self, name: &str, shape: &[usize], trainable: bool, mean: f32, spread: f32) -> usize {
        if self.layout.groups.len() == 1 {
            self.layout.groups.push(Group::FROZEN);
        }
        let index = self.layout.tensors.len();
        let (name, offset) = (format!("{name} {index}"), self.layout.len);
        let key = rng::key(&[5, rng::name(&name)]);
        let group = usize::from(!trainable);
        let slot = TensorSlot { name, shape: shape.to_vec(), offset, group, method: "by hand" };
        self.values.extend((0..slot.len() as u64).map(|at| mean + spread * rng::normal(key, at)));
        self.layout.len += slot.len();
        self.layout.tensors.push(slot);
        index
    }

    pub fn a(&mut self, inputs: usize, trainable: bool) -> usize {
        self.tensor("lora_A", &[3, inputs], trainable, 0.0, 0.3)
    }

    pub fn b(&mut self, columns: usize, trainable: bool) -> usize {
        self.tensor("lora_B", &[columns, 3], trainable, 0.0, 0.2)
    }

    /// Factors around 1.
    pub fn vector(&mut self, len: usize, trainable: bool) -> usize {
        self.tensor("vector", &[len], trainable, 1.0, 0.3)
    }

    pub fn bias(&mut self, len: usize) -> usize {
        self.tensor("vector", &[len], true, 0.0, 0.3)
    }

    pub fn delta(
        &mut self,
        (layer, site): (usize, usize),
        first: usize,
        factors: (usize, usize),
    ) -> &mut Lora {
        let columns = self.layout.tensors[factors.1].shape[0];
        self.loras.push(Lora {
            layer,
            site,
            part: None,
            columns: first..first + columns,
            rank: 3,
            alpha: 3.0,
            scale: 1.5,
            a: factors.0,
            b: factors.1,
            d: None,
            e: None,
        });
        self.loras.last_mut().unwrap()
    }

    pub fn site(
        &mut self,
        (layer, site): (usize, usize),
        u: Option<usize>,
        g: Option<(usize, bool)>,
        bias: Option<usize>,
    ) {
        let g = g.map(|(vector, with_bias)| OutputScale { vector, over_norms: false, with_bias });
        self.vectors.push(SiteVectors { layer, site, u, g, bias });
    }

    /// As [`ByHand::site`], with a g that is the vector over the norms of the columns.
    pub fn site_over_norms(
        &mut self,
        place: (usize, usize),
        u: Option<usize>,
        g: (usize, bool),
        bias: Option<usize>,
    ) {
        self.site(place, u, Some(g), bias);
        self.vectors.last_mut().and_then(|vectors| vectors.g.as_mut()).unwrap().over_norms = true;
    }

    pub fn norm(&mut self, (layer, norm): (Option<usize>, usize), gain: Option<usize>, bias: Option<usize>) {
        self.norms.push(NormVectors { layer, norm, gain, bias });
    }

    pub fn case(self, name: &'static str, dropout: f64) -> Case {
        let spec = AdapterSpec::from(lora("all-linear", dropout));
        let Self { layout, values, loras, vectors, norms } = self;
        let set = AdapterSet {
            spec,
            layout,
            loras,
            vectors,
            norms,
            embedding: None,
            prefix: None,
            prompt: None,
            allocation: None,
        };
        Case { name, set, values }
    }
}

/// A trainer of `case` with the options of [`policies`].
pub fn trainer(base: &Arc<Base>, case: &Case, policy: Policy) -> Trainer {
    policies::trainer(base, case, policies::options(policy))
}

/// Bits of the gradient of the first step, losses and evaluations of three steps, and the state after them.
pub type Outcome = (Vec<u32>, Vec<u64>, TrainerState);

pub fn run(base: &Arc<Base>, case: &Case, policy: Policy) -> Outcome {
    let mut trainer = trainer(base, case, policy);
    let batches = policies::cut(&policies::rows(), 2);
    trainer.accumulate(&batches).unwrap();
    let gradient = bits(&trainer.gradient());
    let mut losses = Vec::new();
    for _ in 0..3 {
        losses.push(trainer.step(&batches, 1e-2).unwrap().loss.to_bits());
        losses.push(trainer.evaluate(&mut batches.iter().cloned()).unwrap().loss.to_bits());
    }
    (gradient, losses, state(&trainer))
}

/// Holds that micro-batches of 1 and 2 rows change the rounding of the gradient of four rows, and nothing else.
pub fn micro_batches_round_otherwise(base: &Arc<Base>, case: &Case) {
    let gradient = |size: usize| {
        let mut trainer = trainer(base, case, Policy::default());
        trainer.accumulate(&policies::cut(&policies::rows(), size)).unwrap();
        let mut gradient = trainer.gradient();
        // A frozen tensor has no gradient to compare.
        let tensors = case.set.layout.tensors.iter().filter(|slot| slot.group == 1);
        tensors.for_each(|slot| gradient[slot.range()].fill(1.0));
        gradient
    };
    let whole = wide(&gradient(4));
    for size in [1, 2] {
        let found = by_tensor(&case.set, &gradient(size), &whole);
        within(found, CHUNKS, &format!("gradients of micro-batches of {size}, {}", case.name));
    }
}

/// Holds the gradient of `case` on [`base`] in 8 bits against autograd on the same weights.
pub fn agrees_with_autograd_in_8_bits(case: &Case) {
    let (random, cache) = (base(), tempfile::tempdir().unwrap());
    let coded = Base::load_as(&random.base.source, "coded", cache.path(), BaseDType::Q8).unwrap();
    let mut worst = autograd::Worst::new();
    autograd::check(&Arc::new(coded), case, 0.0, Recompute::None, &mut worst);
    autograd::report(&worst, &format!("{} on 8-bit weights", case.name));
}
