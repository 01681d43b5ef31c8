//! The flat store in consecutive windows: what an update holds at a time.

use std::ops::Range;

use super::OptimizerKind;
use crate::kernels::adamw8::{self, Piece, SMALLEST};

/// Elements of a window at most: 8 MiB of FP32 moments.
pub const WINDOW: usize = 1 << 20;

/// A stretch of the store and what belongs to it of the optimizer's buffers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Window {
    /// Elements of values and gradient.
    pub range: Range<usize>,
    /// Elements of the FP32 moments.
    pub wide: Range<usize>,
    /// Codes of each 8-bit moment.
    pub codes: Range<usize>,
    /// Scales of each 8-bit moment.
    pub blocks: Range<usize>,
    /// The pieces it consists of.
    pub pieces: Vec<Piece>,
}

impl Window {
    /// The empty window behind this one.
    fn next(&self) -> Self {
        let behind = |range: &Range<usize>| range.end..range.end;
        Self {
            range: behind(&self.range),
            wide: behind(&self.wide),
            codes: behind(&self.codes),
            blocks: behind(&self.blocks),
            pieces: Vec::new(),
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

/// The windows of a store of tensors of these lengths; they end where a tensor or a block ends.
pub fn windows(segments: &[usize], kind: OptimizerKind) -> Vec<Window> {
    let coded = |len: usize| kind == OptimizerKind::AdamW8bit && len >= SMALLEST;
    let mut done = Vec::new();
    let mut open = Window::default();
    for piece in segments.iter().flat_map(|&len| adamw8::pieces(len, coded(len))) {
        if open.range.len() + piece.len > WINDOW {
            let next = open.next();
            done.push(std::mem::replace(&mut open, next));
        }
        open.push(piece);
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
        let segments = [100, 5000, 9_000_001, 4095, 4096, 70_000];
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let windows = windows(&segments, kind);
            let total: usize = segments.iter().sum();
            assert_eq!((windows[0].range.start, windows.last().unwrap().range.end), (0, total));
            assert!(windows.len() >= 3 && windows.iter().all(|window| window.range.len() <= WINDOW));
            for pair in windows.windows(2) {
                assert_eq!(pair[0].next(), Window { pieces: vec![], ..pair[1].clone() }.start());
            }
            // The first ends inside the long tensor, a whole number of blocks after its beginning.
            assert!((windows[0].range.end - 5100).is_multiple_of(adamw8::BLOCK));
            let last = windows.last().unwrap();
            let small = if kind == OptimizerKind::AdamW { total } else { 100 + 4095 };
            assert_eq!((last.wide.end, last.codes.end), (small, total - small));
        }
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
            }
        }
    }
}
