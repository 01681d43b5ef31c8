//! Codes and scales against searches written out in f64; `tests/it/nf4.rs` compares them with bitsandbytes.

use super::*;
use crate::testing::numbers;

/// Every code of `coded`, `(rows, cols)`.
fn codes(coded: &Coded) -> Vec<u32> {
    let Sizes { rows, cols } = coded.sizes;
    (0..rows * cols).map(|at| coded.view().code(at / cols, at % cols)).collect()
}

#[test]
fn codes_are_of_the_nearest_value_and_scales_close_to_the_largest() {
    for (rows, cols) in [(1, 1), (64, 3), (70, 5), (130, 67), (7, 300)] {
        let sizes = Sizes { rows, cols };
        let values = numbers(rows as u64, rows * cols);
        let coded = quantise(&values, sizes);
        let found = codes(&coded);
        let largest = |row: usize, column: usize| {
            let block = row / BLOCK * BLOCK..rows.min((row / BLOCK + 1) * BLOCK);
            block.map(|row| values[row * cols + column].abs()).fold(0f32, f32::max)
        };
        let mut scales = vec![f32::NAN; sizes.decoded()];
        let strip = sizes.blocks() * STRIP;
        for (index, scales) in scales.chunks_mut(strip).enumerate() {
            coded.view().decode_strip(index, scales);
        }
        // The gap of the book is 0.7% of the largest distance from the mean at most, which is below 1.
        for at in 0..rows * cols {
            let (row, column) = (at / cols, at % cols);
            let most = largest(row, column);
            let x = f64::from(values[at]) / f64::from(most);
            let nearest = VALUES.iter().map(|&value| (x - f64::from(value)).abs()).fold(f64::MAX, f64::min);
            let distance = (x - f64::from(VALUES[found[at] as usize])).abs();
            assert!(distance <= nearest + 1e-6, "{x} has code {}", found[at]);
            let scale = scales[Nf4::scale_at(sizes, row, column)];
            assert!((scale - most).abs() <= 0.0075, "scale {scale} for {most}");
        }
        assert!(scales.iter().all(|scale| scale.is_finite()));
    }
}

#[test]
fn scales_have_the_nearest_code_with_a_factor_for_each_256() {
    let largest: Vec<f32> = numbers(3, 700).iter().map(|x| 0.3 + 0.2 * x).collect();
    let (codes, nested) = quantise_scales(&largest);
    assert_eq!((codes.len(), nested.len()), (700, 4));
    for (at, &x) in largest.iter().enumerate() {
        let factor = f64::from(nested[1 + at / NESTED]);
        let x = (f64::from(x) - f64::from(nested[0])) / factor;
        let distance = |code: usize| (x - f64::from(BOOK[code])).abs();
        let nearest = (0..256).map(distance).fold(f64::MAX, f64::min);
        assert!(distance(usize::from(codes[at])) <= nearest + 1e-6, "{x} has code {}", codes[at]);
    }
    // Of equal scales nothing is left.
    let (codes, nested) = quantise_scales(&[0.25; 3]);
    assert_eq!((codes, nested), (vec![ZERO_SCALE; 3], vec![0.25, 0.0]));
}

/// The code of a scale that is the offset itself.
const ZERO_SCALE: u8 = 127;

#[test]
fn the_book_is_ascending_and_has_no_minus_one() {
    assert!(BOOK.windows(2).all(|pair| pair[0] < pair[1]));
    assert_eq!((BOOK[127], BOOK[255]), (0.0, 1.0));
    assert!((BOOK[0] + 0.993).abs() < 1e-3, "{}", BOOK[0]);
    for (code, &value) in BOOK.iter().enumerate() {
        assert_eq!(usize::from(nearest_scale(value)), code);
    }
    for (code, &value) in VALUES.iter().enumerate() {
        assert_eq!(nearest(value) as usize, code);
    }
}

#[test]
fn any_part_of_a_matrix_widens_to_its_values() {
    let sizes = Sizes { rows: 150, cols: 140 };
    let coded = quantise(&numbers(9, sizes.rows * sizes.cols), sizes);
    let mut all = vec![f32::NAN; sizes.rows * sizes.cols];
    coded.view().widen(0..sizes.rows, 0..sizes.cols, &mut all);
    let mut scales = vec![f32::NAN; sizes.decoded()];
    let strip = sizes.blocks() * STRIP;
    for (index, scales) in scales.chunks_mut(strip).enumerate() {
        coded.view().decode_strip(index, scales);
    }
    for (at, &found) in all.iter().enumerate() {
        let (row, column) = (at / sizes.cols, at % sizes.cols);
        let scale = scales[Nf4::scale_at(sizes, row, column)];
        assert_eq!(found, VALUES[coded.view().code(row, column) as usize] * scale);
    }
    for (rows, columns) in
        [(0..1, 0..140), (60..70, 3..9), (127..150, 63..66), (5..5, 0..1), (149..150, 139..140)]
    {
        let mut to = vec![f32::NAN; rows.len() * columns.len()];
        coded.view().widen(rows.clone(), columns.clone(), &mut to);
        let expected = rows.flat_map(|row| columns.clone().map(move |column| (row, column)));
        let expected: Vec<f32> = expected.map(|(row, column)| all[row * sizes.cols + column]).collect();
        assert_eq!(to, expected);
    }
}
