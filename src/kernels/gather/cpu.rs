//! CPU side: a task copies some rows.

use crate::device::cpu::{Shared, tasks::each};

/// Rows that a task copies.
const TASK: usize = 64;

pub fn gather(from: &[f32], rows: &[u32], to: &mut [f32], c: usize) {
    let to = Shared::new(&mut to[..rows.len() * c]);
    each(rows.len().div_ceil(TASK), |task| {
        let rows = &rows[task * TASK..rows.len().min((task + 1) * TASK)];
        // SAFETY: these rows belong to this task.
        let to = unsafe { to.range(task * TASK * c, rows.len() * c) };
        for (to, &row) in to.chunks_exact_mut(c).zip(rows) {
            to.copy_from_slice(&from[row as usize * c..][..c]);
        }
    });
}

pub fn scatter(from: &[f32], rows: &[u32], to: &mut [f32], c: usize) {
    assert!(rows.is_sorted_by(|one, next| one < next), "rows ascend");
    let to = Shared::new(to);
    each(rows.len().div_ceil(TASK), |task| {
        for at in task * TASK..rows.len().min((task + 1) * TASK) {
            // SAFETY: no row occurs twice.
            let to = unsafe { to.range(rows[at] as usize * c, c) };
            to.copy_from_slice(&from[at * c..][..c]);
        }
    });
}
