//! REFERENCE twin of the update, in any precision: books and search by their definition.

use super::BLOCK;
use crate::kernels::adamw::{self, Update};
use engraft_util::real::Real;

/// A moment of one tensor of n elements.
pub struct Coded<'a, T> {
    /// Index into the codebook of each element, `(n)`.
    pub codes: &'a mut [u8],
    /// A scale for every [`BLOCK`] of codes, `(n / BLOCK, rounded up)`.
    pub scales: &'a mut [T],
}

/// The book of the first (`signed`) or second moment, ascending.
pub fn book<T: Real>(signed: bool) -> Vec<T> {
    let mut values = vec![0.0, 1.0];
    for decade in 0..7 {
        let parts = if signed { 1 << decade } else { 2 << decade };
        // Borders as `linspace(0.1, 1, parts + 1)` has them.
        let border = |at: i32| 0.1 + 0.9 * f64::from(at) / f64::from(parts);
        for part in 0..parts {
            let value = 10f64.powi(decade - 6) * (border(part) + border(part + 1)) / 2.0;
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f64::total_cmp);
    values.into_iter().map(T::of).collect()
}

/// Code of the value of `book` nearest to `x`, of two equally near ones that closer to zero.
pub fn nearest<T: Real>(book: &[T], x: T) -> u8 {
    let mut best = 0;
    for (code, &value) in book.iter().enumerate() {
        let (distance, least) = ((value - x).abs(), (book[best] - x).abs());
        if distance < least || (distance == least && value.abs() < book[best].abs()) {
            best = code;
        }
    }
    best as u8
}

/// The moment of codes and scales: `book[code] * scale`.
pub fn decode<T: Real>(book: &[T], codes: &[u8], scales: &[T]) -> Vec<T> {
    codes.iter().enumerate().map(|(at, &code)| book[code as usize] * scales[at / BLOCK]).collect()
}

/// Codes and scales for a moment; `floor`: the lowest code of an element above zero.
pub fn encode<T: Real>(book: &[T], moment: &[T], to: Coded<T>, floor: u8) {
    let Coded { codes, scales } = to;
    let blocks = moment.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales);
    for ((moment, codes), scale) in blocks {
        *scale = moment.iter().fold(T::zero(), |most, x| most.max(x.abs()));
        for (&x, code) in moment.iter().zip(codes) {
            let part = if *scale > T::zero() { x / *scale } else { x };
            *code = nearest(book, part);
            if x > T::zero() {
                *code = (*code).max(floor);
            }
        }
    }
}

/// One update of `values`, a whole tensor, and both its moments.
pub fn update<T: Real>(values: &mut [T], gradient: &[T], first: Coded<T>, second: Coded<T>, u: Update) {
    let (signed, unsigned) = (book(true), book(false));
    let mut m = decode(&signed, first.codes, first.scales);
    let mut v = decode(&unsigned, second.codes, second.scales);
    adamw::reference::update(values, gradient, &mut m, &mut v, u);
    encode(&signed, &m, first, 0);
    encode(&unsigned, &v, second, 1);
}
