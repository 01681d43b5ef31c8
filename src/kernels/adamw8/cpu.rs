//! CPU side: a task takes a piece; each block is decoded, updated and encoded while it is in the cache.

use rayon::prelude::*;

use super::{
    BLOCK, Moments, Piece,
    codebook::{Codebook, SIGNED, UNSIGNED},
};
use crate::{
    device::cpu::vectorised,
    kernels::adamw::{Update, cpu::Factors},
};

/// One 8-bit moment of a piece: codes, and one scale for each block.
struct Coded<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

/// The part of both moments that belongs to a piece.
enum Own<'a> {
    Wide { first: &'a mut [f32], second: &'a mut [f32] },
    Coded { first: Coded<'a>, second: Coded<'a> },
}

struct Task<'a> {
    values: &'a mut [f32],
    gradient: &'a [f32],
    moments: Own<'a>,
}

pub fn update(values: &mut [f32], gradient: &[f32], moments: Moments, pieces: &[Piece], u: Update) {
    let (factors, books) = (Factors::new(u), Books { signed: &SIGNED, unsigned: &UNSIGNED });
    tasks(values, gradient, moments, pieces).into_par_iter().with_max_len(1).for_each(|task| {
        let Task { values, gradient, moments } = task;
        match moments {
            Own::Wide { first, second } => vectorised(
                #[inline(always)]
                || factors.apply(values, gradient, first, second),
            ),
            Own::Coded { first, second } => vectorised(
                #[inline(always)]
                || piece(factors, books, values, gradient, first, second),
            ),
        }
    });
}

/// The pieces with their parts of the moments, in order.
fn tasks<'a>(
    mut values: &'a mut [f32],
    mut gradient: &'a [f32],
    moments: Moments<'a>,
    pieces: &[Piece],
) -> Vec<Task<'a>> {
    let (mut first, mut second) = (moments.first.host::<f32>(), moments.second.host::<f32>());
    let (mut first_codes, mut second_codes) =
        (moments.first_codes.host::<u8>(), moments.second_codes.host::<u8>());
    let (mut first_scales, mut second_scales) =
        (moments.first_scales.host::<f32>(), moments.second_scales.host::<f32>());
    let mut tasks = Vec::with_capacity(pieces.len());
    for &piece in pieces {
        let (len, blocks) = (piece.len, piece.blocks());
        let moments = if piece.coded {
            Own::Coded {
                first: Coded { codes: cut(&mut first_codes, len), scales: cut(&mut first_scales, blocks) },
                second: Coded { codes: cut(&mut second_codes, len), scales: cut(&mut second_scales, blocks) },
            }
        } else {
            Own::Wide { first: cut(&mut first, len), second: cut(&mut second, len) }
        };
        let (own, rest) = gradient.split_at(len);
        gradient = rest;
        tasks.push(Task { values: cut(&mut values, len), gradient: own, moments });
    }
    let left = [first, second, first_scales, second_scales];
    assert!(values.is_empty() && gradient.is_empty(), "adamw8: pieces and values differ");
    assert!(left.iter().all(|list| list.is_empty()), "adamw8: pieces and moments differ");
    assert!(first_codes.is_empty() && second_codes.is_empty(), "adamw8: pieces and codes differ");
    tasks
}

/// Splits the first `len` elements off `rest`.
fn cut<'a, T>(rest: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (own, others) = std::mem::take(rest).split_at_mut(len);
    *rest = others;
    own
}

/// The codebooks of the first and of the second moment.
#[derive(Clone, Copy)]
struct Books<'a> {
    signed: &'a Codebook,
    unsigned: &'a Codebook,
}

#[inline(always)]
fn piece(
    factors: Factors,
    Books { signed, unsigned }: Books,
    values: &mut [f32],
    gradient: &[f32],
    first: Coded,
    second: Coded,
) {
    let (mut m, mut v) = ([0f32; BLOCK], [0f32; BLOCK]);
    let blocks = values.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
    let first = first.codes.chunks_mut(BLOCK).zip(first.scales);
    let second = second.codes.chunks_mut(BLOCK).zip(second.scales);
    for (((values, gradient), (m_codes, m_scale)), (v_codes, v_scale)) in blocks.zip(first).zip(second) {
        let (m, v) = (&mut m[..values.len()], &mut v[..values.len()]);
        decode(signed, m_codes, *m_scale, m);
        decode(unsigned, v_codes, *v_scale, v);
        factors.apply(values, gradient, m, v);
        (*m_scale, *v_scale) = (scale(m), scale(v));
        encode(*m_scale, m, m_codes, |x| signed.signed_code(x));
        // A value above zero never gets the code of zero: see the module.
        encode(*v_scale, v, v_codes, |x| unsigned.unsigned_code(x).max(u32::from(x > 0.0)));
    }
}

/// Codes are 32-bit numbers on this thread's stack first: the compiler cannot know that writing to `codes` leaves the
/// book alone, and would make no vector code.
#[inline(always)]
fn encode(scale: f32, moment: &[f32], codes: &mut [u8], code: impl Fn(f32) -> u32) {
    // A block of zeros is divided by 1.
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    let mut wide = [0u32; BLOCK];
    for (wide, &x) in wide.iter_mut().zip(moment) {
        *wide = code(x / divisor);
    }
    for (code, &wide) in codes.iter_mut().zip(&wide) {
        *code = wide as u8;
    }
}

#[inline(always)]
fn decode(book: &Codebook, codes: &[u8], scale: f32, moment: &mut [f32]) {
    for (x, &code) in moment.iter_mut().zip(codes) {
        *x = book.values[code as usize] * scale;
    }
}

/// The largest absolute value, found by its bits: their order is that of the values, and a maximum of whole
/// numbers becomes vector code. At most the largest float: with an infinite scale, neighbours would decode to NaN.
#[inline(always)]
fn scale(moment: &[f32]) -> f32 {
    let most = moment.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
    f32::from_bits(most.min(f32::MAX.to_bits()))
}
