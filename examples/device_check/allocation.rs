//! The penalty on factors that are not orthonormal, and the allocation of ranks, on the device against the CPU side.

use engraft::{
    device::{Buffer, DType::F32},
    error::Result,
    kernels::{
        importance::{self, Smoothing, Triplets},
        orthogonality::{self, Factor},
    },
};

use crate::{inputs::On, ops::Outputs};

/// Two deltas of odd sizes: three updates of the importance, its scores, and what is not kept.
pub fn ranks(on: On) -> Result<Outputs> {
    let (mut deltas, mut factors, mut at, mut gram) = (Vec::new(), Vec::new(), 3, 0);
    for (rank, inputs, outputs, first) in [(5, 70, 131, 0), (12, 300, 33, 5)] {
        let (a, b) = (at, at + rank * inputs);
        let d = b + rank * outputs;
        deltas.push(Triplets { a, b, d, rank, inputs, outputs, first });
        for (at, len, transposed) in [(a, inputs, false), (b, outputs, true)] {
            factors.push(Factor { at, rank, len, transposed, gram });
            gram += Factor::scratch(rank);
        }
        at = d + rank + 2;
    }
    let (mut values, mut gradient, mut grams) = (on.wide(1, at)?, on.wide(2, at)?, on.zeros(F32, gram)?);
    let (to, scratch) = (gradient.view_mut(), grams.view_mut());
    orthogonality::backward(values.view(), &factors, 0.3, to, scratch);
    let (mut mean, mut uncertainty) = (on.zeros(F32, at)?, on.zeros(F32, at)?);
    let by = Smoothing { betas: (0.85, 0.6), factor: 0.37 };
    for seed in 3..6 {
        let gradient = on.wide(seed, at)?;
        let to = (mean.view_mut(), uncertainty.view_mut());
        importance::smooth(values.view(), gradient.view(), to.0, to.1, by);
    }
    let mut scores = on.zeros(F32, 17)?;
    importance::scores(mean.view(), uncertainty.view(), &deltas, scores.view_mut());
    let kept: Vec<f32> = (0..17).map(|rank| if rank % 3 == 1 { 0.0 } else { 1.0 }).collect();
    let kept = Buffer::on(on.device, &kept)?;
    importance::keep(kept.view(), &deltas, values.view_mut());
    Ok(vec![
        ("gradient of the penalty", gradient.view().to_vec()),
        ("importance", mean.view().to_vec()),
        ("uncertainty", uncertainty.view().to_vec()),
        ("scores", scores.view().to_vec()),
        ("what is kept", values.view().to_vec()),
    ])
}
