//! CPU side: one row a token.

use half::f16;

use crate::kernels::cpu::{Shared, each, wide};

/// Rows a task takes.
const ROWS: usize = 64;

pub fn forward(ids: &[u32], positions: &[u32], wte: &[f16], wpe: &[f16], x: &mut [f32], c: usize) {
    let n = ids.len();
    assert!(positions.len() == n && x.len() == n * c, "embed shapes");
    let x = Shared::new(x);
    each(n.div_ceil(ROWS), |task| {
        for row in task * ROWS..n.min((task + 1) * ROWS) {
            let token = &wte[ids[row] as usize * c..][..c];
            let position = &wpe[positions[row] as usize * c..][..c];
            // SAFETY: this row belongs to this task.
            let x = unsafe { x.range(row * c, c) };
            for ((x, &token), &position) in x.iter_mut().zip(token).zip(position) {
                *x = wide(token) + wide(position);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::halves;

    #[test]
    fn adds_the_rows_of_both_tables() {
        let (wte, wpe) = (halves(1, 7 * 3), halves(2, 5 * 3));
        let (ids, positions) = ([6u32, 0, 2], [0u32, 4, 4]);
        let mut x = [0f32; 9];
        forward(&ids, &positions, &wte, &wpe, &mut x, 3);
        for row in 0..3 {
            for i in 0..3 {
                let expected =
                    wte[ids[row] as usize * 3 + i].to_f32() + wpe[positions[row] as usize * 3 + i].to_f32();
                assert_eq!(x[row * 3 + i], expected);
            }
        }
    }
}
