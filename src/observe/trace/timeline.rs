//! Samples in bounded memory: when there are too many, neighbours are merged two by two.

use super::{Sample, TraceRecorder};

/// Grows up to `capacity` samples, then halves its resolution; peaks are exact all the same.
pub struct Timeline {
    samples: Vec<Sample>,
    capacity: usize,
    /// How many pushed samples one kept sample stands for.
    stride: usize,
    /// The highest sample of the group that is not complete, and how many it stands for.
    open: Option<(Sample, usize)>,
    /// The highest sample of each phase.
    phases: Vec<Sample>,
}

impl Timeline {
    pub fn new(capacity: usize) -> Self {
        Self { samples: Vec::new(), capacity: capacity.max(2), stride: 1, open: None, phases: Vec::new() }
    }

    pub fn push(&mut self, sample: Sample) {
        match self.phases.iter_mut().find(|peak| peak.phase == sample.phase) {
            Some(peak) => *peak = higher(*peak, sample),
            None => self.phases.push(sample),
        }
        let (highest, count) =
            self.open.take().map_or((sample, 1), |(open, count)| (higher(open, sample), count + 1));
        if count < self.stride {
            self.open = Some((highest, count));
            return;
        }
        self.samples.push(highest);
        if self.samples.len() >= self.capacity {
            self.samples = merged(&self.samples, 2);
            self.stride *= 2;
        }
    }

    pub fn finish(mut self, high_water: Option<u64>) -> TraceRecorder {
        self.samples.extend(self.open.map(|(sample, _)| sample));
        let peak = self.phases.iter().copied().reduce(higher);
        self.phases.sort_by_key(|sample| sample.phase);
        TraceRecorder { samples: self.samples, peak, phases: self.phases, high_water }
    }
}

/// The highest sample of every `group` neighbours.
pub fn merged(samples: &[Sample], group: usize) -> Vec<Sample> {
    samples.chunks(group.max(1)).filter_map(|group| group.iter().copied().reduce(higher)).collect()
}

/// The earlier one where both are as high.
fn higher(a: Sample, b: Sample) -> Sample {
    if b.height() > a.height() { b } else { a }
}
