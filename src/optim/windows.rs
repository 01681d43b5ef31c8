//! The flat store in consecutive windows, which an update processes one by one.

use std::ops::Range;

use engraft_adapters::{Group, Segment};

use super::OptimizerKind;
use crate::kernels::adamw8::{self, Piece, SMALLEST};

/// Most elements of a window: 8 MiB of FP32 moments.
pub const WINDOW: usize = 1 << 20;

/// A range of the store, and the same values' ranges in the optimizer's buffers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Window {
    /// Range in the values and in the gradient.
    pub range: Range<usize>,
    /// Range in the FP32 moments.
    pub wide: Range<usize>,
    /// Range in the codes of each 8-bit moment.
    pub codes: Range<usize>,
    /// Range in the scales of each 8-bit moment.
    pub blocks: Range<usize>,
    /// The pieces it consists of.
    pub pieces: Vec<Piece>,
    /// Learning rate and decay of all its elements.
    pub group: Group,
}

impl Window {
    /// The empty window of `group` that begins at `start` of the store, with the moments after those of this one.
    fn next(&self, start: usize, group: Group) -> Self {
        let after = |range: &Range<usize>| range.end..range.end;
        Self {
            range: start..start,
            wide: after(&self.wide),
            codes: after(&self.codes),
            blocks: after(&self.blocks),
            pieces: Vec::new(),
            group,
        }
    }

    fn push(&mut self, piece: Piece) {
        self.range.end += piece.len;
        if piece.coded {
            self.codes.end += piece.len
        } else {
            self.wide.end += piece.len
        }
        self.blocks.end += piece.blocks();
        self.pieces.push(piece);
    }
}

/// The windows of a store of these tensors: each ends where a tensor or a block ends, and has elements of one
/// group. Frozen tensors are in none, and have no moments.
pub fn windows(segments: &[Segment], kind: OptimizerKind) -> Vec<Window> {
    let coded = |len: usize| kind == OptimizerKind::AdamW8bit && len >= SMALLEST;
    let mut done = Vec::new();
    let mut open = Window::default();
    for segment in segments.iter().filter(|segment| segment.group.trainable) {
        let mut start = segment.offset;
        for piece in adamw8::pieces(segment.len, coded(segment.len)) {
            let fits = open.range.len() + piece.len <= WINDOW;
            if !fits || start != open.range.end || segment.group != open.group {
                let next = open.next(start, segment.group);
                let full = std::mem::replace(&mut open, next);
                done.extend(Some(full).filter(|full| !full.range.is_empty()));
            }
            open.push(piece);
            start += piece.len;
        }
    }
    // A store without trainables has one window too.
    done.push(open);
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_follow_one_another_and_end_with_blocks() {
        let lens = [100, 5000, 9_000_001, 4095, 4096, 70_000];
        let segments = Segment::of(&lens);
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let windows = windows(&segments, kind);
            let total: usize = lens.iter().sum();
            assert_eq!((windows[0].range.start, windows.last().unwrap().range.end), (0, total));
            assert!(windows.len() >= 3 && windows.iter().all(|window| window.range.len() <= WINDOW));
            for pair in windows.windows(2) {
                let next = pair[0].next(pair[0].range.end, Group::DEFAULT);
                assert_eq!(next, Window { pieces: vec![], ..pair[1].clone() }.start());
            }
            // The first ends inside the long tensor, a whole number of blocks after its beginning.
            assert!((windows[0].range.end - 5100).is_multiple_of(adamw8::BLOCK));
            let last = windows.last().unwrap();
            let small = if kind == OptimizerKind::AdamW { total } else { 100 + 4095 };
            assert_eq!((last.wide.end, last.codes.end), (small, total - small));
        }
    }

    #[test]
    fn windows_leave_frozen_tensors_out_and_hold_one_group_each() {
        let fast = Group { lr_factor: 2.0, ..Group::DEFAULT };
        let mut segments = Segment::of(&[300, 5000, 70, 6000, 9]);
        for (segment, group) in segments.iter_mut().zip([Group::FROZEN, fast, fast, Group::FROZEN]) {
            segment.group = group;
        }
        let found = windows(&segments, OptimizerKind::AdamW8bit);
        let ranges: Vec<_> = found.iter().map(|window| (window.range.clone(), window.group)).collect();
        assert_eq!(ranges, [(300..5370, fast), (11_370..11_379, Group::DEFAULT)]);
        let moments: Vec<_> =
            found.iter().map(|window| (window.wide.clone(), window.codes.clone())).collect();
        assert_eq!(moments, [(0..70, 0..5000), (70..79, 5000..5000)]);
        let none = [Segment { offset: 0, len: 5, group: Group::FROZEN }];
        assert_eq!(windows(&none, OptimizerKind::AdamW), [Window::default()]);
    }

    impl Window {
        fn start(self) -> Self {
            let front = |range: Range<usize>| range.start..range.start;
            Self {
                range: front(self.range),
                wide: front(self.wide),
                codes: front(self.codes),
                blocks: front(self.blocks),
                pieces: self.pieces,
                group: self.group,
            }
        }
    }
}
