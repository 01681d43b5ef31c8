//! AdamW over one flat FP32 store, with clipping by the global norm.

use super::{Moments, OptimizerKind, SavedTensor, StateTensor, Window, windows};
use crate::{
    device::{
        View, ViewMut,
        arena::{Arenas, Placement},
        page_cache::{PageRequest, Pager},
    },
    error::Result,
    kernels::{
        adamw::{self, Update},
        adamw8,
    },
};

/// Numbers of AdamW; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the bias-corrected root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, of every trainable.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Both moments of a flat store, and how many updates they have seen.
pub struct Optimizer {
    kind: OptimizerKind,
    options: AdamWOptions,
    moments: Moments,
    windows: Vec<Window>,
    step: u64,
    /// Moves the moments of windows where they lie in a file.
    pager: Option<Pager>,
}

impl Optimizer {
    /// Zero moments for a store of tensors of these lengths, in order, at `place` of `arenas`.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(
        kind: OptimizerKind,
        segments: &[usize],
        options: AdamWOptions,
        place: Placement,
        arenas: &mut Arenas,
    ) -> Result<Self> {
        let moments = arenas.build("moments", place, |arena| Moments::cut(arena, segments, kind))?;
        let pager = if place == Placement::Disk && arenas.are_real() { Some(Pager::start()?) } else { None };
        Ok(Self { kind, options, moments, windows: windows(segments, kind), step: 0, pager })
    }

    /// One update of `values` by a gradient that is `scale` times too large; returns the norm of the true gradient
    /// before clipping to `clip` (0: no clipping). Where that is not finite values and moments are left as they
    /// were, and the update does not count.
    pub fn update(&mut self, values: ViewMut, gradient: View, lr: f64, clip: f64, scale: f64) -> f64 {
        let clipping = adamw::clipping(gradient, clip, scale);
        if clipping.allows_update() {
            self.all_windows(values, gradient, lr, clipping.factor());
        }
        let norm = clipping.norm();
        self.step += u64::from(norm.is_finite());
        norm
    }

    fn all_windows(&mut self, mut values: ViewMut, gradient: View, lr: f64, factor: f64) {
        let AdamWOptions { betas, eps, weight_decay } = self.options;
        let update = Update { step: self.step + 1, lr, betas, epsilon: eps, weight_decay, factor };
        for (index, window) in self.windows.iter().enumerate() {
            turn(&mut self.pager, &self.moments, &self.windows, index);
            let (start, len) = (window.range.start, window.range.len());
            let (values, gradient) = (values.reborrow().slice(start, len), gradient.slice(start, len));
            let moments = self.moments.window(window);
            match self.kind {
                OptimizerKind::AdamW => {
                    adamw::update(values, gradient, moments.first, moments.second, update);
                }
                OptimizerKind::AdamW8bit => {
                    adamw8::update(values, gradient, moments, &window.pieces, update);
                }
            }
        }
        turn(&mut self.pager, &self.moments, &self.windows, self.windows.len());
        if let Some(pager) = &mut self.pager {
            pager.wait();
        }
    }

    /// Updates made so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The stretches of the store that an update takes one after another.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// Everything a resume file must hold besides the values, by name.
    pub fn tensors(&self) -> Vec<StateTensor<'_>> {
        self.moments.tensors()
    }

    /// Goes on from the tensors saved after `step` updates, in the order of [`Optimizer::tensors`].
    ///
    /// # Errors
    /// When they are not those of this optimizer in name, type and size; it is then as before.
    pub fn restore(&mut self, step: u64, tensors: &[SavedTensor]) -> Result<()> {
        self.moments.check(tensors)?;
        self.moments.upload(tensors);
        self.step = step;
        Ok(())
    }
}

/// The update enters window `index`: the next one is fetched, the one before given back.
fn turn(pager: &mut Option<Pager>, moments: &Moments, windows: &[Window], index: usize) {
    let Some(pager) = pager else { return };
    let regions = |index: Option<usize>| {
        index.and_then(|index| windows.get(index)).map(|window| moments.regions(window)).unwrap_or_default()
    };
    pager.send(PageRequest { release: regions(index.checked_sub(1)), fetch: regions(Some(index + 1)) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Small tensors between large ones, odd lengths, more than one window.
    const SEGMENTS: [usize; 5] = [100, 5_000_003, 4095, 4096, 70_001];

    fn optimizer(kind: OptimizerKind, place: Placement) -> Optimizer {
        let mut arenas = Arenas::real(Some(std::env::temp_dir()));
        Optimizer::new(kind, &SEGMENTS, AdamWOptions::default(), place, &mut arenas).unwrap()
    }

    fn trained(kind: OptimizerKind, steps: u64) -> (Vec<f32>, Optimizer) {
        let mut optimizer = optimizer(kind, Placement::Memory);
        let len = SEGMENTS.iter().sum();
        let mut values = numbers(1, len);
        for step in 0..steps {
            go_on(&mut values, &mut optimizer, step);
        }
        (values, optimizer)
    }

    fn go_on(values: &mut Vec<f32>, optimizer: &mut Optimizer, step: u64) {
        let gradient = numbers(10 + step, values.len());
        optimizer.update(values.as_mut_slice().into(), gradient[..].into(), 1e-3, 1.0, 1.0);
    }

    fn copies(optimizer: &Optimizer) -> Vec<(&'static str, crate::device::DType, Vec<u8>)> {
        let tensors = optimizer.tensors().into_iter();
        tensors.map(|(name, view, _)| (name, view.dtype(), view.bytes().to_vec())).collect()
    }

    #[test]
    fn both_kinds_go_on_from_their_tensors_bit_for_bit() {
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let (mut values, mut first) = trained(kind, 2);
            let saved = copies(&first);
            let stored: Vec<SavedTensor> = saved
                .iter()
                .map(|(name, dtype, bytes)| SavedTensor { name, dtype: *dtype, bytes, pages: None })
                .collect();
            let mut second = optimizer(kind, Placement::Disk);
            assert!(second.restore(2, &stored[1..]).is_err(), "a missing tensor is refused");
            second.restore(2, &stored).unwrap();
            let mut again = values.clone();
            go_on(&mut values, &mut first, 2);
            go_on(&mut again, &mut second, 2);
            assert!(values == again && copies(&first) == copies(&second) && second.step() == 3);
        }
    }

    #[test]
    fn another_kind_is_refused_and_small_tensors_are_those_of_fp32() {
        let (wide_values, wide) = trained(OptimizerKind::AdamW, 3);
        let (values, mut coded) = trained(OptimizerKind::AdamW8bit, 3);
        let saved = copies(&wide);
        let stored: Vec<SavedTensor> = saved
            .iter()
            .map(|(name, dtype, bytes)| SavedTensor { name, dtype: *dtype, bytes, pages: None })
            .collect();
        let message = coded.restore(3, &stored).unwrap_err().to_string();
        assert!(message.contains("second_codes (U8") && message.contains("first_moment (F32"), "{message}");
        assert_eq!(values[..100], wide_values[..100]);
        let small = 100 + 5_000_003;
        assert_eq!(values[small..small + 4095], wide_values[small..small + 4095]);
        assert_ne!(values, wide_values);
    }
}
