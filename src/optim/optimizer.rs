//! AdamW over one flat FP32 store, with clipping by the global norm.

use std::ops::Range;

use engraft_adapters::{Group, Segment};

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

/// Hyperparameters of AdamW; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the bias-corrected root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, of every group that has none of its own.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

impl AdamWOptions {
    /// Hyperparameters of update `step` for a group. A factor of exactly 1 keeps every bit of the learning rate.
    fn update(self, step: u64, lr: f64, factor: f64, group: Group) -> Update {
        let weight_decay = group.weight_decay.unwrap_or(self.weight_decay);
        let (betas, epsilon, lr) = (self.betas, self.eps, lr * group.lr_factor);
        Update { step, lr, betas, epsilon, weight_decay, factor }
    }
}

/// Both moments of a flat store, and how many updates they have seen.
pub struct Optimizer {
    kind: OptimizerKind,
    options: AdamWOptions,
    moments: Moments,
    windows: Vec<Window>,
    /// Values that are never updated.
    frozen: Vec<Range<usize>>,
    step: u64,
    /// Prefetches and releases the moments of windows if they are in a file.
    pager: Option<Pager>,
}

impl Optimizer {
    /// Zero moments for a store of these tensors, at `place` of `arenas`.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(
        kind: OptimizerKind,
        segments: &[Segment],
        options: AdamWOptions,
        place: Placement,
        arenas: &mut Arenas,
    ) -> Result<Self> {
        let moments = arenas.build("moments", place, |arena| Moments::cut(arena, segments, kind))?;
        let pager = if place == Placement::Disk && arenas.are_real() { Some(Pager::start()?) } else { None };
        let windows = windows(segments, kind);
        let frozen = segments.iter().filter(|segment| !segment.group.trainable).map(Segment::range).collect();
        Ok(Self { kind, options, moments, windows, frozen, step: 0, pager })
    }

    /// One update of `values` by a gradient that is `scale` times too large; returns the norm of the true gradient
    /// before clipping to `clip` (0: no clipping). If the norm is not finite, values and moments stay as they
    /// are, and the update does not count. The gradient of frozen values is cleared first, so that the norm
    /// is that of the others.
    pub fn update(&mut self, values: ViewMut, gradient: ViewMut, lr: f64, clip: f64, scale: f64) -> f64 {
        let mut gradient = gradient;
        for frozen in &self.frozen {
            gradient.reborrow().slice(frozen.start, frozen.len()).clear();
        }
        let gradient = gradient.into_view();
        let clipping = adamw::clipping(gradient, clip, scale);
        if clipping.allows_update() {
            self.all_windows(values, gradient, lr, clipping.factor());
        }
        let norm = clipping.norm();
        self.step += u64::from(norm.is_finite());
        norm
    }

    fn all_windows(&mut self, mut values: ViewMut, gradient: View, lr: f64, factor: f64) {
        let options = self.options;
        let step = self.step + 1;
        for (index, window) in self.windows.iter().enumerate() {
            page_in(&mut self.pager, &self.moments, &self.windows, index);
            let (start, len) = (window.range.start, window.range.len());
            let (values, gradient) = (values.reborrow().slice(start, len), gradient.slice(start, len));
            let moments = self.moments.window(window);
            let update = options.update(step, lr, factor, window.group);
            match self.kind {
                OptimizerKind::AdamW => {
                    adamw::update(values, gradient, moments.first, moments.second, update);
                }
                OptimizerKind::AdamW8bit => {
                    adamw8::update(values, gradient, moments, &window.pieces, update);
                }
            }
        }
        page_in(&mut self.pager, &self.moments, &self.windows, self.windows.len());
        if let Some(pager) = &mut self.pager {
            pager.wait();
        }
    }

    /// The factor of a gradient of that `norm` in an update: unscaling times clipping.
    pub fn factor(norm: f64, clip: f64, scale: f64) -> f64 {
        adamw::factor(norm, clip) / scale
    }

    /// Number of updates made so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The windows of the store, in the order in which an update takes them.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// The named tensors that a resume file must contain in addition to the values.
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

/// Called before the update of window `index`: prefetches the next one and releases the one before.
fn page_in(pager: &mut Option<Pager>, moments: &Moments, windows: &[Window], index: usize) {
    let Some(pager) = pager else { return };
    let regions = |index: Option<usize>| {
        index.and_then(|index| windows.get(index)).map(|window| moments.regions(window)).unwrap_or_default()
    };
    pager.send(PageRequest { release: regions(index.checked_sub(1)), fetch: regions(Some(index + 1)) });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, numbers, widened};

    /// Small tensors between large ones, odd lengths, more than one window.
    const SEGMENTS: [usize; 5] = [100, 5_000_003, 4095, 4096, 70_001];

    fn optimizer(kind: OptimizerKind, place: Placement) -> Optimizer {
        let mut arenas = Arenas::real(Some(std::env::temp_dir()));
        Optimizer::new(kind, &Segment::of(&SEGMENTS), AdamWOptions::default(), place, &mut arenas).unwrap()
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
        let mut gradient = numbers(10 + step, values.len());
        optimizer.update(values.as_mut_slice().into(), gradient.as_mut_slice().into(), 1e-3, 1.0, 1.0);
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

    /// Two groups and a frozen tensor between them, against the twins in f64, tensor by tensor.
    #[test]
    fn each_group_has_its_own_rate_and_decay_and_frozen_values_stay() {
        let groups = [
            Group { lr_factor: 16.0, weight_decay: Some(0.0), trainable: true },
            Group::FROZEN,
            Group { weight_decay: Some(0.25), ..Group::DEFAULT },
            Group::DEFAULT,
        ];
        let mut segments = Segment::of(&[301, 5003, 4999, 77]);
        segments.iter_mut().zip(groups).for_each(|(segment, group)| segment.group = group);
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let options = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
            let mut arenas = Arenas::real(None);
            let mut optimizer =
                Optimizer::new(kind, &segments, options, Placement::Memory, &mut arenas).unwrap();
            let mut values = numbers(1, 10_380);
            let begin = values.clone();
            let mut twins: Vec<Twin> = segments.iter().map(|segment| Twin::new(segment, &values)).collect();
            for step in 1..=3 {
                let gradient = numbers(10 + step, values.len());
                let squares = segments.iter().filter(|segment| segment.group.trainable);
                let squares = squares.flat_map(|segment| &gradient[segment.range()]);
                let norm = squares.map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                let found = optimizer.update(
                    values.as_mut_slice().into(),
                    gradient.clone().as_mut_slice().into(),
                    1e-2,
                    1.0,
                    1.0,
                );
                assert!((found / norm - 1.0).abs() < 1e-12, "{found} {norm}");
                for (twin, segment) in twins.iter_mut().zip(&segments) {
                    twin.update(segment, &gradient, step, 1.0 / (norm + 1e-6), kind);
                }
            }
            assert!(values[301..5304] == begin[301..5304], "a frozen value has changed");
            for (twin, segment) in twins.iter().zip(&segments) {
                // A code may round to its neighbour in f64; a wrong rate or decay moves values by 4e-3 and more.
                let coded = kind == OptimizerKind::AdamW8bit && segment.len >= adamw8::SMALLEST;
                let tolerance = if coded { 1e-3 } else { 1e-6 };
                assert_close(&values[segment.range()], &twin.values, tolerance, kind.name());
            }
            let held: usize = optimizer.tensors().iter().take(2).map(|(_, view, _)| view.len()).sum();
            let large = if kind == OptimizerKind::AdamW { 4999 } else { 0 };
            assert_eq!(held, 2 * (301 + 77 + large), "moments of what is trained, and no others");
        }
    }

    /// One tensor and its moments in f64.
    struct Twin {
        values: Vec<f64>,
        wide: [Vec<f64>; 2],
        codes: [Vec<u8>; 2],
        scales: [Vec<f64>; 2],
    }

    impl Twin {
        fn new(segment: &Segment, values: &[f32]) -> Self {
            let (len, blocks) = (segment.len, segment.len.div_ceil(adamw8::BLOCK));
            // Code 127 of the signed book is zero, as is code 0 of the unsigned one.
            Self {
                values: widened(&values[segment.range()]),
                wide: [vec![0.0; len], vec![0.0; len]],
                codes: [vec![127; len], vec![0; len]],
                scales: [vec![0.0; blocks], vec![0.0; blocks]],
            }
        }

        fn update(
            &mut self,
            segment: &Segment,
            gradient: &[f32],
            step: u64,
            factor: f64,
            kind: OptimizerKind,
        ) {
            let Group { lr_factor, weight_decay, trainable } = segment.group;
            if !trainable {
                return;
            }
            let u = Update {
                step,
                lr: 1e-2 * lr_factor,
                betas: (0.9, 0.999),
                epsilon: 1e-8,
                weight_decay: weight_decay.unwrap_or(0.1),
                factor,
            };
            let gradient = widened(&gradient[segment.range()]);
            if kind == OptimizerKind::AdamW8bit && segment.len >= adamw8::SMALLEST {
                let ([c1, c2], [s1, s2]) = (&mut self.codes, &mut self.scales);
                let first = adamw8::reference::Coded { codes: c1, scales: s1 };
                let second = adamw8::reference::Coded { codes: c2, scales: s2 };
                adamw8::reference::update(&mut self.values, &gradient, first, second, u);
            } else {
                let [m, v] = &mut self.wide;
                adamw::reference::update(&mut self.values, &gradient, m, v, u);
            }
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
