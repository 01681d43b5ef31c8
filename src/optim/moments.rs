//! The two moments of a flat store as buffers: FP32, or 8-bit where tensors are large enough.

use std::{convert::Infallible, ops::Range};

use engraft_adapters::Segment;

use super::windows::{WINDOW, Window, windows};
use crate::{
    device::{
        Buffer,
        DType::{self, F32, U8},
        View, ViewMut,
        arena::Arena,
        page_cache::{PIECE, Region},
    },
    error::{Error, Result},
    kernels::adamw8,
};

/// Number format of AdamW's moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OptimizerKind {
    /// FP32: 8 bytes per trainable value.
    #[default]
    AdamW,
    /// 8 bits with a scale for every 256 elements: 2.03 bytes a trainable. Tensors below 4096 elements
    /// stay in FP32.
    AdamW8bit,
}

impl OptimizerKind {
    /// The name on the command line and in saves.
    pub fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::AdamW8bit => "adamw8bit",
        }
    }

    /// Bytes of moments in memory at a time if they are in a file: a window, the one before and the
    /// one after it.
    pub fn window_bytes(self) -> u64 {
        // Tensors below 4096 elements have FP32 moments in either kind.
        3 * 8 * WINDOW as u64
    }
}

/// Names of the buffers, in memory tables and in saves, of the first and of the second moment.
const WIDE: [&str; 2] = ["first_moment", "second_moment"];
const CODES: [&str; 2] = ["first_codes", "second_codes"];
const SCALES: [&str; 2] = ["first_scales", "second_scales"];

/// A named tensor as a save holds it.
#[derive(Clone)]
pub struct SavedTensor<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// F32, or the type of the codes and scales of 8-bit moments.
    pub dtype: DType,
    /// The elements' bytes, with any alignment.
    pub bytes: &'a [u8],
    /// The pages of the bytes, where they may be of a file.
    pub pages: Option<Region>,
}

/// A tensor that a save must hold: its name, its elements, and their pages.
pub type StateTensor<'a> = (&'static str, View<'a>, Option<Region>);

impl SavedTensor<'_> {
    /// Calls `take` with the bytes piece by piece, each with its offset, and releases the pages of pieces that were
    /// taken, so that moments in a file are never in memory as a whole.
    ///
    /// # Errors
    /// The first error of `take`.
    pub fn each_piece<E>(&self, mut take: impl FnMut(usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        for (index, piece) in self.bytes.chunks(PIECE).enumerate() {
            take(index * PIECE, piece)?;
            if let Some(pages) = &self.pages {
                pages.part(index * PIECE, piece.len()).release();
            }
        }
        Ok(())
    }
}

/// The buffers of both moments.
pub struct Moments {
    /// FP32 elements of the first and the second moment.
    wide: [Buffer; 2],
    /// Codes and scales of the 8-bit part of the first and the second moment.
    coded: Option<[(Buffer, Buffer); 2]>,
}

impl Moments {
    /// Cuts the moments of a store of these tensors, none for frozen ones; zero in a fresh arena.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, segments: &[Segment], kind: OptimizerKind) -> Result<Self> {
        let end = windows(segments, kind).pop().unwrap_or_default();
        let wide = pair(WIDE, |name| arena.take(name, F32, &[end.wide.end]))?;
        let coded = match kind {
            OptimizerKind::AdamW => None,
            OptimizerKind::AdamW8bit => {
                let [first, second] = pair(CODES, |name| arena.take(name, U8, &[end.codes.end]))?;
                let scales = pair(SCALES, |name| arena.take(name, F32, &[end.blocks.end]))?;
                let [first_scales, second_scales] = scales;
                Some([(first, first_scales), (second, second_scales)])
            }
        };
        Ok(Self { wide, coded })
    }

    /// Everything a resume file must hold, by name: FP32 before 8-bit parts, first before second moment. A
    /// part without elements is left out.
    pub fn tensors(&self) -> Vec<StateTensor<'_>> {
        let wide = WIDE.into_iter().zip(&self.wide);
        let coded = self.coded.iter().flatten().zip(CODES.into_iter().zip(SCALES));
        let coded = coded.flat_map(|((codes, scales), (c, s))| [(c, codes), (s, scales)]);
        let held = wide.chain(coded).filter(|(_, buffer)| !buffer.is_empty());
        held.map(|(name, buffer)| (name, buffer.view(), buffer.region())).collect()
    }

    /// Refuses `tensors` that are not those of [`Moments::tensors`] in name, type and size.
    pub(super) fn check(&self, tensors: &[SavedTensor]) -> Result<()> {
        let found: Vec<_> = tensors.iter().map(|t| (t.name, t.dtype, t.bytes.len())).collect();
        let own: Vec<_> =
            self.tensors().iter().map(|(name, view, _)| (*name, view.dtype(), view.size())).collect();
        if found == own {
            return Ok(());
        }
        let list = |all: &[(&str, DType, usize)]| {
            let all: Vec<_> =
                all.iter().map(|(name, dtype, bytes)| format!("{name} ({dtype:?}, {bytes} bytes)")).collect();
            all.join(", ")
        };
        Err(Error::input(format!(
            "the save holds {} where this optimizer needs {}; resume with the options it was made with",
            list(&found),
            list(&own)
        )))
    }

    /// Copies tensors that [`Moments::check`] has accepted.
    pub(super) fn upload(&mut self, tensors: &[SavedTensor]) {
        let coded = self.coded.iter_mut().flatten().flat_map(|(codes, scales)| [codes, scales]);
        let own = self.wide.iter_mut().chain(coded).filter(|buffer| !buffer.is_empty());
        own.zip(tensors).for_each(|(buffer, stored)| upload(buffer, stored));
    }

    /// The pages of a window's moments.
    pub(super) fn regions(&self, window: &Window) -> Vec<Region> {
        let wide = self.wide.iter().map(|buffer| buffer.part(window.wide.clone()));
        let coded = self.coded.iter().flatten().flat_map(|(codes, scales)| {
            [codes.part(window.codes.clone()), scales.part(window.blocks.clone())]
        });
        wide.chain(coded).flatten().collect()
    }

    /// The moments of a window. With FP32 moments the 8-bit parts are empty.
    pub(super) fn window(&mut self, window: &Window) -> adamw8::Moments<'_> {
        let [first, second] = &mut self.wide;
        let mut codes: [ViewMut; 2] = [<&mut [u8]>::default().into(), <&mut [u8]>::default().into()];
        let mut scales: [ViewMut; 2] = [<&mut [f32]>::default().into(), <&mut [f32]>::default().into()];
        for (at, (own_codes, own_scales)) in self.coded.iter_mut().flatten().enumerate() {
            codes[at] = part(own_codes, &window.codes);
            scales[at] = part(own_scales, &window.blocks);
        }
        let ([first_codes, second_codes], [first_scales, second_scales]) = (codes, scales);
        adamw8::Moments {
            first: part(first, &window.wide),
            second: part(second, &window.wide),
            first_codes,
            first_scales,
            second_codes,
            second_scales,
        }
    }
}

/// Copies a tensor's bytes into a buffer, in pieces.
pub(crate) fn upload(buffer: &mut Buffer, stored: &SavedTensor) {
    let size = buffer.view().dtype().size();
    let Ok(()) = stored.each_piece(|start, piece| -> Result<(), Infallible> {
        let elements = start / size..(start + piece.len()) / size;
        buffer.view_mut().slice(elements.start, elements.len()).upload_bytes(piece);
        if let Some(pages) = buffer.part(elements) {
            pages.release();
        }
        Ok(())
    });
}

fn part<'a>(buffer: &'a mut Buffer, range: &Range<usize>) -> ViewMut<'a> {
    buffer.view_mut().slice(range.start, range.len())
}

fn pair(
    names: [&'static str; 2],
    mut take: impl FnMut(&'static str) -> Result<Buffer>,
) -> Result<[Buffer; 2]> {
    let [first, second] = names;
    Ok([take(first)?, take(second)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::arena::{Arenas, Placement, TableRow};

    /// Rank 84 on c_attn, attn.c_proj and c_fc of gpt2 (12 layers of width 768), and a few biases' worth of
    /// small tensors: 10.9M trainables.
    fn segments() -> Vec<usize> {
        let sites = [(768, 2304), (768, 768), (768, 3072)];
        let layer = sites.into_iter().flat_map(|(inputs, outputs)| [84 * inputs, 84 * outputs]);
        let layer: Vec<usize> = layer.chain([3 * 768]).collect();
        layer.repeat(12)
    }

    fn planned(kind: OptimizerKind) -> usize {
        let mut arenas = Arenas::planning();
        arenas
            .build("moments", Placement::Memory, |arena| Moments::cut(arena, &Segment::of(&segments()), kind))
            .unwrap();
        arenas.rows().iter().map(TableRow::bytes).sum()
    }

    #[test]
    fn ten_million_trainables_need_21_megabytes() {
        let len: usize = segments().iter().sum();
        let per_ten_million = |bytes: usize| bytes as f64 / len as f64 * 1e7;
        let used = planned(OptimizerKind::AdamW8bit);
        println!("8-bit: {used} bytes for {len} trainables, {:.0} for 10M", per_ten_million(used));
        assert!(len > 8_000_000);
        assert!(per_ten_million(used) <= 21e6, "{used} bytes for {len} trainables");
        assert!(planned(OptimizerKind::AdamW) - 8 * len < 128);
    }

    #[test]
    fn pieces_are_all_the_bytes_in_order() {
        let bytes: Vec<u8> = (0..2 * PIECE + 12).map(|at| (at % 253) as u8).collect();
        let stored = SavedTensor { name: "first_moment", dtype: F32, bytes: &bytes, pages: None };
        let mut seen: Vec<u8> = Vec::new();
        let all = stored.each_piece(|start, piece| {
            assert!(start == seen.len() && piece.len() <= PIECE);
            seen.extend(piece);
            Ok::<(), ()>(())
        });
        assert!(all.is_ok() && seen == bytes);
        let mut buffer = Arenas::real(None)
            .build("moments", Placement::Memory, |arena| arena.take("m", F32, &[bytes.len() / 4]))
            .unwrap();
        upload(&mut buffer, &stored);
        assert!(buffer.view().bytes() == bytes);
        assert_eq!(stored.each_piece(|start, _| if start == 0 { Ok(()) } else { Err(start) }), Err(PIECE));
    }

    fn held(segments: &[usize], kind: OptimizerKind) -> Moments {
        let cut = |arena: &mut Arena| Moments::cut(arena, &Segment::of(segments), kind);
        Arenas::real(None).build("moments", Placement::Memory, cut).unwrap()
    }

    #[test]
    fn names_types_and_sizes_are_those_of_the_kind() {
        let named = |kind| {
            let moments = held(&[4095, 4096, 300, 5000], kind);
            let tensors = moments.tensors();
            tensors.iter().map(|(name, view, _)| (*name, view.dtype(), view.len())).collect::<Vec<_>>()
        };
        let len = 4095 + 4096 + 300 + 5000;
        assert_eq!(named(OptimizerKind::AdamW), [("first_moment", F32, len), ("second_moment", F32, len)]);
        let large = held(&[5000], OptimizerKind::AdamW8bit);
        assert_eq!(large.tensors()[0].0, "first_codes");
        let (small, large, blocks) = (4395, 9096, 16 + 20);
        assert_eq!(
            named(OptimizerKind::AdamW8bit),
            [
                ("first_moment", F32, small),
                ("second_moment", F32, small),
                ("first_codes", U8, large),
                ("first_scales", F32, blocks),
                ("second_codes", U8, large),
                ("second_scales", F32, blocks),
            ]
        );
    }
}
