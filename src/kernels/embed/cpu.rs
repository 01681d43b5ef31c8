//! CPU side: a task takes some rows of the output.

use half::f16;

use crate::{
    device::cpu::{Shared, tasks::each, wide},
    kernels::matmul::Matrix,
};

/// Rows that a task takes.
const ROWS: usize = 64;

pub fn forward(ids: &[u32], positions: &[u32], wte: Matrix, wpe: &[f16], x: &mut [f32]) {
    let (n, c, tokens) = (ids.len(), wte.cols, wte.host());
    assert!(positions.len() == n && x.len() == n * c, "embed shapes");
    let x = Shared::new(x);
    each(n.div_ceil(ROWS), |task| {
        for row in task * ROWS..n.min((task + 1) * ROWS) {
            let position = &wpe[positions[row] as usize * c..][..c];
            // SAFETY: this row belongs to this task.
            let x = unsafe { x.range(row * c, c) };
            tokens.widen(c, (ids[row] as usize, 0), x);
            x.iter_mut().zip(position).for_each(|(x, &position)| *x += wide(position));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kernels::q8, testing::f16_numbers};

    #[test]
    fn adds_the_rows_of_both_tables() {
        let (wte, wpe) = (f16_numbers(1, 7 * 3), f16_numbers(2, 5 * 3));
        let (ids, positions) = ([6u32, 0, 2], [0u32, 4, 4]);
        let mut x = [0f32; 9];
        forward(&ids, &positions, Matrix::f16(wte[..].into(), 7, 3), &wpe, &mut x);
        for row in 0..3 {
            for i in 0..3 {
                let expected =
                    wte[ids[row] as usize * 3 + i].to_f32() + wpe[positions[row] as usize * 3 + i].to_f32();
                assert_eq!(x[row * 3 + i], expected);
            }
        }
    }

    #[test]
    fn an_8_bit_table_gives_its_values() {
        let c = q8::BLOCK + 3;
        let codes: Vec<i8> = (0..2 * c).map(|i| (i * 53 % 255) as u8 as i8).collect();
        let scales = [0.5, 3.0, 0.125, 1.0].map(f16::from_f32);
        let wpe = f16_numbers(2, c);
        let mut x = vec![0f32; c];
        forward(&[1], &[0], Matrix::codes(codes[..].into(), scales[..].into(), 2, c), &wpe, &mut x);
        for i in 0..c {
            let token = f32::from(codes[c + i]) * scales[2 + i / q8::BLOCK].to_f32();
            assert_eq!(x[i], token + wpe[i].to_f32());
        }
    }
}
