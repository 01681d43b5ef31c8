//! The part of an optimizer step that allocates ranks among deltas (AdaLoRA, Zhang et al. 2023, arXiv:2303.10512), as PEFT
//! 0.21.2 does it when `update_and_allocate` is called after each update with the number of updates before it.
//!
//! Before an update the gradient of a penalty on factors that are not orthonormal is added. After it the importance of
//! every value is smoothed from the new values and the clipped gradient that they were updated by, and the triplets that
//! are least important lose their element of d. In the last steps the same ones stay 0.

use std::ops::Range;

use engraft_adapters::{AdapterSet, RankAllocation};

use super::{SavedTensor, StateTensor, moments};
use crate::{
    device::{
        Buffer,
        DType::F32,
        View, ViewMut,
        arena::{Arenas, Placement},
    },
    error::{Error, Result},
    kernels::{
        importance::{self, Smoothing, Triplets},
        orthogonality::{self, Factor},
    },
};

/// Names of the buffers, in memory tables and in saves.
const STATE: [&str; 3] = ["importance", "uncertainty", "kept_ranks"];

/// The state of an allocation between steps.
pub struct RankAllocator {
    rule: RankAllocation,
    /// Deltas, with places in the range of the store that the means have.
    deltas: Vec<Triplets>,
    /// A and B of all deltas, with places in the store.
    factors: Vec<Factor>,
    /// The values of the deltas in the store.
    range: Range<usize>,
    /// Smoothed importance and its uncertainty of every value of `range`, and 1 for each triplet that is kept.
    state: [Buffer; 3],
    /// A score for each triplet.
    scores: Buffer,
    /// Scratch of the penalty.
    grams: Buffer,
}

impl RankAllocator {
    /// A fresh state in memory from `arenas`; `None` where the set allocates no ranks.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(set: &AdapterSet, arenas: &mut Arenas) -> Result<Option<Self>> {
        let Some(rule) = set.allocation.clone().filter(|rule| !rule.triplets.is_empty()) else {
            return Ok(None);
        };
        let slots = &set.layout.tensors;
        let tensors = rule.triplets.iter().flat_map(|own| [own.a, own.b, own.d]);
        let ranges = tensors.map(|tensor| slots[tensor].range());
        let range =
            ranges.reduce(|all, own| all.start.min(own.start)..all.end.max(own.end)).unwrap_or_default();
        let (mut deltas, mut factors) = (Vec::new(), Vec::new());
        let (mut ranks, mut grams) = (0, 0);
        for own in &rule.triplets {
            let (a, b, rank) = (&slots[own.a], &slots[own.b], slots[own.a].shape[0]);
            let (inputs, outputs) = (a.shape[1], b.shape[0]);
            let place = |tensor: usize| slots[tensor].offset - range.start;
            let [a_at, b_at, d] = [place(own.a), place(own.b), place(own.d)];
            deltas.push(Triplets { a: a_at, b: b_at, d, rank, inputs, outputs, first: ranks });
            ranks += rank;
            for (slot, len, transposed) in [(a, inputs, false), (b, outputs, true)] {
                factors.push(Factor { at: slot.offset, rank, len, transposed, gram: grams });
                grams += Factor::scratch(rank);
            }
        }
        let lens = [range.len(), range.len(), ranks];
        let (mut state, scores, grams) = arenas.build("allocation of ranks", Placement::Memory, |arena| {
            let [mean, uncertainty, kept] = STATE;
            let state = [
                arena.take(mean, F32, &lens[..1])?,
                arena.take(uncertainty, F32, &lens[1..2])?,
                arena.take(kept, F32, &lens[2..])?,
            ];
            Ok((state, arena.take("scores", F32, &[ranks])?, arena.take("products", F32, &[grams])?))
        })?;
        if arenas.are_real() {
            state[2].view_mut().upload(&vec![1f32; ranks]);
        }
        Ok(Some(Self { rule, deltas, factors, range, state, scores, grams }))
    }

    /// Adds the gradient of the penalty to `gradient`, which is `scale` times too large.
    pub fn add_penalty(&mut self, values: View, gradient: ViewMut, scale: f64) {
        let weight = self.rule.penalty * scale / (2 * self.rule.modules) as f64;
        if weight > 0.0 {
            let grams = self.grams.view_mut();
            orthogonality::backward(values, &self.factors, weight as f32, gradient, grams);
        }
    }

    /// Takes update number `step`, counted from 0, into account: `values` are the new ones, and `factor` is that of the
    /// gradient in the update.
    pub fn after_update(&mut self, step: u64, mut values: ViewMut, gradient: View, factor: f64) {
        let RankAllocation { steps, tfinal, every, betas, .. } = self.rule;
        let (start, len) = (self.range.start, self.range.len());
        if steps == 0 {
            return; // a training of unknown length allocates nothing
        }
        let last = steps.saturating_sub(tfinal);
        if step < last {
            let [mean, uncertainty, _] = &mut self.state;
            let own = values.as_view().slice(start, len);
            let smoothing = Smoothing { betas, factor };
            let to = (mean.view_mut(), uncertainty.view_mut());
            importance::smooth(own, gradient.slice(start, len), to.0, to.1, smoothing);
        }
        let is_due = step > self.rule.tinit && step < last && step.is_multiple_of(every);
        if is_due || step == last {
            self.choose(step);
        }
        if is_due || step >= last {
            importance::keep(self.state[2].view(), &self.deltas, values.reborrow().slice(start, len));
        }
    }

    /// Decides which triplets are kept.
    fn choose(&mut self, step: u64) {
        let [mean, uncertainty, kept] = &mut self.state;
        importance::scores(mean.view(), uncertainty.view(), &self.deltas, self.scores.view_mut());
        let scores: Vec<f32> = self.scores.view().to_vec();
        let budget = budget(&self.rule, step, scores.len());
        kept.view_mut().upload(&most_important(&scores, budget));
    }

    /// Everything that a save must contain, by name.
    pub fn tensors(&self) -> Vec<StateTensor<'_>> {
        STATE
            .into_iter()
            .zip(&self.state)
            .map(|(name, buffer)| (name, buffer.view(), buffer.region()))
            .collect()
    }

    /// Refuses `tensors` that are not those of [`RankAllocator::tensors`] in name, type and size.
    ///
    /// # Errors
    /// [`Error::Input`] if they are not.
    pub fn check(&self, tensors: &[SavedTensor]) -> Result<()> {
        let found: Vec<_> = tensors.iter().map(|it| (it.name, it.dtype, it.bytes.len())).collect();
        let own: Vec<_> =
            self.tensors().iter().map(|(name, view, _)| (*name, view.dtype(), view.size())).collect();
        if found == own {
            return Ok(());
        }
        Err(Error::input(
            "the save does not hold the importance of this adapter's values; resume with the options it was made with",
        ))
    }

    /// Goes on from tensors that [`RankAllocator::check`] has accepted.
    pub fn restore(&mut self, tensors: &[SavedTensor]) {
        self.state.iter_mut().zip(tensors).for_each(|(buffer, stored)| moments::upload(buffer, stored));
    }
}

/// Number of triplets of `all` that are kept after update `step`.
fn budget(rule: &RankAllocation, step: u64, all: usize) -> usize {
    let RankAllocation { tinit, tfinal, steps, budget, .. } = *rule;
    let falling = steps.saturating_sub(tfinal).saturating_sub(tinit);
    let left = 1.0 - (step - tinit) as f64 / falling.max(1) as f64;
    // As in PEFT: rounded down after the sum.
    ((all as f64 - budget as f64) * left.powf(3.0) + budget as f64) as usize
}

/// 1 for each score above that of the least important one that is taken away, else 0: of equal scores all are taken away.
fn most_important(scores: &[f32], budget: usize) -> Vec<f32> {
    let Some(last) = scores.len().checked_sub(budget).and_then(|taken| taken.checked_sub(1)) else {
        return vec![1.0; scores.len()];
    };
    let mut sorted = scores.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    let threshold = sorted[last];
    scores.iter().map(|&score| if score <= threshold { 0.0 } else { 1.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(budget: usize) -> RankAllocation {
        RankAllocation {
            triplets: Vec::new(),
            modules: 1,
            budget,
            tinit: 10,
            tfinal: 20,
            every: 1,
            betas: (0.85, 0.85),
            penalty: 0.5,
            steps: 100,
        }
    }

    #[test]
    fn the_budget_falls_with_the_cube_of_the_steps_left() {
        let at = |step| budget(&rule(24), step, 96);
        assert_eq!((at(10), at(80)), (96, 24));
        // 72 (34 / 70)^3 + 24 = 32.25
        assert_eq!(at(46), 32);
        assert!((11..80).all(|step| at(step) <= at(step - 1)));
        // An adapter of which less is left than the budget loses nothing.
        assert!(budget(&rule(24), 80, 20) >= 20);
    }

    #[test]
    fn the_least_important_triplets_are_taken_away_and_with_them_their_equals() {
        let scores = [0.5, 0.1, 0.3, 0.1, 0.9];
        assert_eq!(most_important(&scores, 5), [1.0; 5]);
        assert_eq!(most_important(&scores, 7), [1.0; 5]);
        assert_eq!(most_important(&scores, 4), [1.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!(most_important(&scores, 2), [1.0, 0.0, 0.0, 0.0, 1.0]);
        assert_eq!(most_important(&scores, 0), [0.0; 5]);
        // As torch.kthvalue, which takes what is no number for the largest.
        assert_eq!(most_important(&[f32::NAN, 1.0, 2.0], 1), [1.0, 0.0, 0.0]);
    }
}
