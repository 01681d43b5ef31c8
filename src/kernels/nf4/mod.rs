//! 4-bit weights: NF4 with double quantisation, as QLoRA defines it (Dettmers et al. 2023, sections 3 and appendix E)
//! and bitsandbytes computes it.
//!
//! A matrix `(rows, cols)` is cut into blocks of [`BLOCK`] consecutive rows of a column: the inputs of one output of
//! GPT-2's Conv1D, which Transformers transposes before it quantises. A weight is `VALUES[code] * scale`, in FP32. The
//! scales, numbered column by column, are coded themselves: `scale = book[code] * nested + offset`, with one FP32
//! factor for [`NESTED`] scales, one offset for the matrix, and the signed book of 8-bit moments.
//!
//! bitsandbytes lets blocks run on from one column to the next where the rows are no multiple of 64; here such a column
//! ends with a shorter block. No GPT-2 on the hub has such sizes.
//!
//! In memory the codes of [`WORD`] consecutive rows of a column make a little-endian 32-bit word: the first four rows in
//! the lower halves of its bytes, the others in the upper halves. [`STRIP`] columns lie side by side, word row after word row, so that a task reads one stretch of memory
//! and a vector of words holds the same rows of neighbouring columns. Rows and columns that fill up words and strips
//! have the code of zero.

use std::{ops::Range, sync::LazyLock};

use rayon::prelude::*;

#[cfg(feature = "cuda")]
pub(super) mod cuda;
#[cfg(test)]
mod tests;

/// Consecutive rows of a column that share a scale.
pub const BLOCK: usize = 64;
/// Consecutive scales that share a factor.
pub const NESTED: usize = 256;
/// Columns that lie side by side.
pub const STRIP: usize = 64;
/// Rows whose codes make a word.
pub const WORD: usize = 8;
/// The code of 0.
const ZERO: u32 = 7;

/// The value of each code: quantiles of the normal distribution, from bitsandbytes' `get_4bit_type("nf4")`.
pub const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The signed dynamic map of bitsandbytes (`create_dynamic_map()`), ascending: FP32 arithmetic as PyTorch does it, which
/// differs in last places from the book of our 8-bit moments.
static BOOK: LazyLock<[f32; 256]> = LazyLock::new(|| {
    const ZERO: usize = 127;
    let mut book = [0f32; 256];
    let mut at = ZERO;
    for decade in 0..7 {
        let parts = 1usize << decade;
        let step = (1.0 - 0.1f32) / parts as f32;
        // PyTorch's linspace counts from both ends.
        let border = |i: usize| match i < parts.div_ceil(2) {
            true => step.mul_add(i as f32, 0.1),
            false => (-step).mul_add((parts - i) as f32, 1.0),
        };
        let top = 10f64.powi(decade - 6) as f32;
        for i in 0..parts {
            at += 1;
            book[at] = top * ((border(i) + border(i + 1)) / 2.0);
            book[2 * ZERO - at] = -book[at];
        }
    }
    // There is no -1.
    book[255] = 1.0;
    book
});

/// The value of each code of a scale.
pub fn book() -> &'static [f32; 256] {
    &BOOK
}

/// Sizes of the three tensors of a coded matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the matrix, the inputs of a layer.
    pub rows: usize,
    /// Columns, the outputs of a layer.
    pub cols: usize,
}

impl Sizes {
    /// Bytes of the codes, with those that fill up words and strips.
    pub fn codes(self) -> usize {
        4 * self.word_rows() * self.cols.next_multiple_of(STRIP)
    }

    /// Number of scales, a byte each.
    pub fn scales(self) -> usize {
        self.cols * self.blocks()
    }

    /// Floats beside them: the offset and the factors.
    pub fn nested(self) -> usize {
        1 + self.scales().div_ceil(NESTED)
    }

    /// Bytes of all three.
    pub fn bytes(self) -> usize {
        self.codes() + self.scales() + 4 * self.nested()
    }

    /// Blocks of a column.
    pub fn blocks(self) -> usize {
        self.rows.div_ceil(BLOCK)
    }

    /// Floats that all scales take as [`Nf4::decode_strip`] writes them.
    pub fn decoded(self) -> usize {
        self.blocks() * self.cols.next_multiple_of(STRIP)
    }

    fn word_rows(self) -> usize {
        self.rows.div_ceil(WORD)
    }
}

/// The lowest bit of the code of a row in its word.
fn shift(row: usize) -> usize {
    8 * (row % 4) + 4 * (row / 4 % 2)
}

/// A coded matrix.
#[derive(Clone, Copy)]
pub struct Nf4<'a> {
    /// Sizes of the matrix.
    pub sizes: Sizes,
    /// Words of codes, `(strips, word rows, STRIP)`.
    pub codes: &'a [u8],
    /// Codes of the scales, `(cols, blocks)`.
    pub scales: &'a [u8],
    /// The offset, then the factor of each [`NESTED`] scales.
    pub nested: &'a [f32],
}

impl Nf4<'_> {
    /// Asserts that the tensors have the lengths that the sizes say.
    pub fn check(self) -> Self {
        let Self { sizes, codes, scales, nested } = self;
        assert!(
            codes.len() >= sizes.codes() && scales.len() >= sizes.scales() && nested.len() >= sizes.nested(),
            "a 4-bit matrix of {} x {} has more elements",
            sizes.rows,
            sizes.cols
        );
        self
    }

    /// Byte of the word with the codes of `row` of `column`.
    pub fn word_at(sizes: Sizes, row: usize, column: usize) -> usize {
        4 * ((column / STRIP * sizes.word_rows() + row / WORD) * STRIP + column % STRIP)
    }

    /// Index of the scale of `row` of `column` among all that [`Nf4::decode_strip`] writes.
    pub fn scale_at(sizes: Sizes, row: usize, column: usize) -> usize {
        (column / STRIP * sizes.blocks() + row / BLOCK) * STRIP + column % STRIP
    }

    /// Writes the scales of a strip, `(blocks, STRIP)`; those of columns that fill it up are 0.
    pub fn decode_strip(self, strip: usize, to: &mut [f32]) {
        let blocks = self.sizes.blocks();
        let columns = strip * STRIP..(strip + 1) * STRIP;
        self.decode(columns, 0..blocks, to);
    }

    /// Writes the scales of `blocks` of `columns`, `(blocks, columns)`; those of columns that there are not are 0.
    fn decode(self, columns: Range<usize>, blocks: Range<usize>, to: &mut [f32]) {
        let Self { sizes, scales, nested, .. } = self;
        let (all, width) = (sizes.blocks(), columns.len());
        let to = &mut to[..blocks.len() * width];
        let (offset, book) = (nested[0], &*BOOK);
        for (index, column) in columns.enumerate() {
            let mut to = to.iter_mut().skip(index).step_by(width);
            if column >= sizes.cols {
                to.for_each(|to| *to = 0.0);
                continue;
            }
            let (mut at, end) = (column * all + blocks.start, column * all + blocks.end);
            while at < end {
                let stop = end.min((at / NESTED + 1) * NESTED);
                let factor = nested[1 + at / NESTED];
                for (&code, to) in scales[at..stop].iter().zip(&mut to) {
                    *to = book[usize::from(code)] * factor + offset;
                }
                at = stop;
            }
        }
    }

    /// Writes the values of some rows and columns, `(rows, columns)`.
    pub fn widen(self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        const PIECE: usize = 128;
        let (width, mut row, mut scales) = (columns.len(), rows.start, [0f32; PIECE]);
        assert!(to.len() >= rows.len() * width, "room for the values");
        while row < rows.end {
            let end = rows.end.min((row / BLOCK + 1) * BLOCK);
            for first in columns.clone().step_by(PIECE) {
                let piece = first..columns.end.min(first + PIECE);
                self.decode(piece.clone(), row / BLOCK..row / BLOCK + 1, &mut scales);
                for row in row..end {
                    let to = &mut to[(row - rows.start) * width + first - columns.start..];
                    for ((to, column), scale) in to.iter_mut().zip(piece.clone()).zip(&scales) {
                        *to = VALUES[self.code(row, column) as usize] * scale;
                    }
                }
            }
            row = end;
        }
    }

    fn code(self, row: usize, column: usize) -> u32 {
        let at = Self::word_at(self.sizes, row, column);
        let word = self.codes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes);
        (word >> shift(row)) & 15
    }
}

/// The tensors of a coded matrix, in memory of their own.
#[derive(Debug, Clone, PartialEq)]
pub struct Coded {
    /// Sizes of the matrix.
    pub sizes: Sizes,
    /// As [`Nf4::codes`].
    pub codes: Vec<u8>,
    /// As [`Nf4::scales`].
    pub scales: Vec<u8>,
    /// As [`Nf4::nested`].
    pub nested: Vec<f32>,
}

impl Coded {
    /// The matrix for kernels.
    pub fn view(&self) -> Nf4<'_> {
        Nf4 { sizes: self.sizes, codes: &self.codes, scales: &self.scales, nested: &self.nested }
    }
}

/// Quantises finite `values (rows, cols)`.
///
/// Codes are those of bitsandbytes bit for bit. So are factors where the offset is: bitsandbytes adds the scales up in
/// FP32, here they are added in f64, so the offset may differ in its last place. A code of a scale is the nearest one;
/// bitsandbytes' CPU kernel searches a table that moves borders by up to 1e-5.
///
/// # Panics
/// When there are fewer values.
pub fn quantise(values: &[f32], sizes: Sizes) -> Coded {
    let (blocks, strips) = (sizes.blocks(), sizes.cols.div_ceil(STRIP));
    let mut codes = vec![0u8; sizes.codes()];
    // (strips, STRIP, blocks): with those that fill up the last strip.
    let mut largest = vec![0f32; strips * STRIP * blocks];
    let strip_bytes = (codes.len() / strips.max(1)).max(1);
    codes
        .par_chunks_exact_mut(strip_bytes)
        .zip(largest.par_chunks_exact_mut((STRIP * blocks).max(1)))
        .enumerate()
        .for_each(|(strip, (codes, largest))| quantise_strip(values, sizes, strip, (codes, largest)));
    largest.truncate(sizes.scales());
    let (scales, nested) = quantise_scales(&largest);
    Coded { sizes, codes, scales, nested }
}

/// Codes of a strip, and the largest magnitudes `(STRIP, blocks)` of its blocks.
fn quantise_strip(values: &[f32], sizes: Sizes, strip: usize, (codes, largest): (&mut [u8], &mut [f32])) {
    let blocks = sizes.blocks();
    let (words, _) = codes.as_chunks_mut::<4>();
    for index in 0..STRIP {
        let column = strip * STRIP + index;
        for block in 0..blocks {
            let rows = block * BLOCK..sizes.rows.min((block + 1) * BLOCK);
            let value =
                |row: usize| if column < sizes.cols { values[row * sizes.cols + column] } else { 0.0 };
            let most = rows.clone().fold(0f32, |most, row| most.max(value(row).abs()));
            largest[index * blocks + block] = most;
            // A product, not a quotient, as in bitsandbytes; blocks of zeros have no scale.
            let factor = 1.0 / most.max(1e-38);
            for first in rows.clone().step_by(WORD) {
                let mut word = 0u32;
                for row in first..first + WORD {
                    let code = if row < rows.end { nearest(value(row) * factor) } else { ZERO };
                    word |= code << shift(row);
                }
                words[first / WORD * STRIP + index] = word.to_le_bytes();
            }
        }
    }
}

/// The code of the value nearest to `x` in -1 ..= 1, of two equally near ones the lower.
fn nearest(x: f32) -> u32 {
    let above = VALUES.windows(2).filter(|pair| x > (pair[0] + pair[1]) / 2.0);
    above.count() as u32
}

/// Codes of scales, and their offset and factors.
fn quantise_scales(largest: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let sum: f64 = largest.iter().map(|&most| f64::from(most)).sum();
    let offset = (sum / largest.len().max(1) as f64) as f32;
    let (mut codes, mut nested) = (Vec::with_capacity(largest.len()), vec![offset]);
    for block in largest.chunks(NESTED) {
        let factor = block.iter().fold(0f32, |most, &x| most.max((x - offset).abs()));
        nested.push(factor);
        let inverse = if factor == 0.0 { 0.0 } else { 1.0 / factor };
        codes.extend(block.iter().map(|&x| nearest_scale((x - offset) * inverse)));
    }
    (codes, nested)
}

/// The code of the value of the book nearest to `x`, of two equally near ones the lower.
fn nearest_scale(x: f32) -> u8 {
    let above = BOOK.partition_point(|&value| value < x);
    let nearer = |low: usize| f64::from(x) - f64::from(BOOK[low]) <= f64::from(BOOK[low + 1]) - f64::from(x);
    match above.min(BOOK.len() - 1).checked_sub(1) {
        Some(low) if nearer(low) => low as u8,
        _ => above.min(BOOK.len() - 1) as u8,
    }
}
