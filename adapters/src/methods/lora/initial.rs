//! Initial values of A and B, by PEFT's names (`init_lora_weights`).
//!
//! | name | A | B |
//! |---|---|---|
//! | `default` | U(-1/sqrt(inputs), 1/sqrt(inputs)) | 0 |
//! | `gaussian` | N(0, 1/rank^2) | 0 |
//! | `orthogonal` | `(X Q_1)^T / 10` | `Y Q_2 / 10` |
//! | `pissa` | `diag(sqrt(S / s)) U^T` | `V diag(sqrt(S / s))` |
//! | `olora` | `Q^T W^T` | Q |
//!
//! Here s is the scale, X and Y are of N(0, 1), and Q_1 and Q_2 every other row of one orthogonal matrix, so that B A = 0.
//! `U diag(S) V^T` are the leading singular vectors of the weight W [inputs, outputs] (PiSSA, Meng et al. 2024,
//! arXiv:2404.02948), and Q an orthonormal basis of the first `rank` columns of W^T (OLoRA, Buyukakyuz 2024,
//! arXiv:2406.01775).
//!
//! With the last two B A is not 0. They train A and B against `W - s (B A)^T`, W without what the LoRA begins as. A base is
//! never written: a copy of the initial A and of -B stays frozen beside the two, another delta of the same scale. In PEFT's
//! files both are one LoRA of twice the rank, as PEFT itself converts it (`subtract_mutated_init`).

use std::{fmt, str::FromStr};

use engraft_util::rng;
use serde::{Deserialize, Serialize};

use super::LoraSpec;
use crate::{
    AdapterSet, Error, Group, Lora, Result, TensorSlot,
    init::Init,
    layout::Slots,
    methods::Kind,
    svd::{Matrix, Svd, dot, orthonormal},
};

/// How A and B begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitialFactors {
    /// A drawn uniformly, and B = 0.
    #[default]
    Default,
    /// A drawn normally, and B = 0.
    Gaussian,
    /// Both drawn, of directions at right angles.
    Orthogonal,
    /// Leading singular vectors of the base's weight.
    Pissa,
    /// A part of the QR decomposition of the base's weight.
    Olora,
}

use InitialFactors::{Default as Usual, Gaussian, Olora, Orthogonal, Pissa};

/// Divides X and Y of `orthogonal`, as in PEFT.
const SHRINK: f64 = 0.1;

impl InitialFactors {
    const ALL: [(Self, &str); 5] = [
        (Usual, "default"),
        (Gaussian, "gaussian"),
        (Orthogonal, "orthogonal"),
        (Pissa, "pissa"),
        (Olora, "olora"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    /// Whether these are the usual ones.
    pub fn is_default(&self) -> bool {
        *self == Usual
    }

    /// Whether frozen copies of the initial values belong to A and B.
    pub fn has_copies(self) -> bool {
        matches!(self, Pissa | Olora)
    }

    /// Writes the initial values of the deltas of a method of `kind`.
    pub(super) fn write(self, kind: &Kind, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        let slots = &set.layout.tensors;
        let mut trained: Option<&Lora> = None;
        for lora in set.loras_of(kind) {
            let (a, b) = (&slots[lora.a], &slots[lora.b]);
            if let Some(first) = trained.filter(|_| is_copy(set, lora)) {
                values.copy_within(slots[first.a].range(), a.offset);
                values.copy_within(slots[first.b].range(), b.offset);
                values[b.range()].iter_mut().for_each(|b| *b = -*b);
                continue;
            }
            trained = Some(lora);
            let mut fill = |slot: &TensorSlot, found: Vec<f64>| {
                values[slot.range()].iter_mut().zip(found).for_each(|(to, x)| *to = x as f32);
            };
            match self {
                Usual => from.uniform(values, a, lora.inputs(set)),
                Gaussian => {
                    from.normal(values, a);
                    values[a.range()].iter_mut().for_each(|a| *a /= lora.rank as f32);
                }
                Orthogonal => {
                    let (for_a, for_b) = orthogonal(lora.rank, (a, b), from.seed);
                    fill(a, for_a);
                    fill(b, for_b);
                }
                Pissa | Olora => {
                    let weight = from.matrix(kind.name, lora.site, lora.layer)?;
                    let weight = columns_of(&weight, lora, lora.inputs(set));
                    let (for_a, for_b) = if self == Pissa {
                        pissa(&weight, lora.rank, lora.scale.into())
                    } else {
                        olora(&weight, lora.rank)
                    };
                    fill(a, for_a);
                    fill(b, for_b);
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for InitialFactors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for InitialFactors {
    type Err = String;

    /// Also takes `true`, PEFT's word for the default, and PEFT's `pissa_niter_N`: singular vectors are always found by
    /// iterations, until they are exact.
    ///
    /// # Errors
    /// The remedy for an unknown name.
    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.to_lowercase();
        let name = match name.strip_prefix("pissa_niter_") {
            Some(count) if count.parse::<u32>().is_ok() => Pissa.name(),
            _ if name == "true" => Usual.name(),
            _ => name.as_str(),
        };
        let found = Self::ALL.into_iter().find(|(_, known)| *known == name).map(|(found, _)| found);
        found.ok_or_else(|| "give default, gaussian, orthogonal, pissa or olora".to_owned())
    }
}

impl LoraSpec {
    /// Refuses a delta on the module at `path` that cannot begin as the spec says.
    pub(super) fn check_initial(&self, lora: &Lora, path: &str, inputs: usize) -> Result<()> {
        let init = self.init_lora_weights;
        let refuse = |why: String| Err(Error::InitialFactors { init: init.name(), why });
        let (rank, most) = (lora.rank, inputs.min(lora.columns.len()));
        if init == Orthogonal && rank % 2 == 1 {
            return refuse(format!("needs even ranks, and that of {path} is {rank}; give another one"));
        }
        if !init.has_copies() {
            return Ok(());
        }
        if rank > most {
            return refuse(format!(
                "takes as many directions of {path} as the rank, {rank}, and it has {most}; lower the rank"
            ));
        }
        if self.dropout > 0.0 {
            return refuse(format!(
                "begins with a part of the base's weights, whose inputs a dropout of {} would drop; leave the dropout out",
                self.dropout
            ));
        }
        if init == Pissa && lora.scale <= 0.0 {
            return refuse(format!("needs an alpha above 0, and that of {path} is {}", lora.alpha));
        }
        Ok(())
    }
}

impl Lora {
    fn inputs(&self, set: &AdapterSet) -> usize {
        set.layout.tensors[self.a].shape[1]
    }
}

/// The frozen copy of a new delta's initial values on the module at `path`: its B is that of the delta times -1.
pub(super) fn push_copy(lora: &Lora, path: &str, inputs: usize, slots: &mut Slots) -> Result<Lora> {
    let (a, b) = ([lora.rank, inputs], [lora.columns.len(), lora.rank]);
    Ok(Lora {
        a: slots.push_to(Group::FROZEN, format!("{path}.lora_A0.weight"), &a)?,
        b: slots.push_to(Group::FROZEN, format!("{path}.lora_B0.weight"), &b)?,
        ..lora.clone()
    })
}

/// Whether a delta of a LoRA is the frozen copy of the one before it.
pub(super) fn is_copy(set: &AdapterSet, lora: &Lora) -> bool {
    !set.layout.groups[set.layout.tensors[lora.b].group].trainable
}

/// The part of a weight [inputs, outputs] that a delta adds to, [inputs, columns].
fn columns_of(weight: &[f32], lora: &Lora, inputs: usize) -> Matrix {
    let outputs = weight.len() / inputs;
    let row = |row: &[f32]| row[lora.columns.clone()].iter().map(|&w| f64::from(w)).collect::<Vec<_>>();
    Matrix::new(inputs, lora.columns.len(), weight.chunks_exact(outputs).flat_map(row).collect())
}

/// A [rank, inputs] and B [outputs, rank] with `s (B A)^T = U diag(S) V^T`.
fn pissa(weight: &Matrix, rank: usize, scale: f64) -> (Vec<f64>, Vec<f64>) {
    let svd = Svd::leading(weight, rank);
    let (mut a, mut b) = (vec![0.0; rank * weight.rows], vec![0.0; weight.cols * rank]);
    for (k, ((u, v), s)) in svd.u.iter().zip(&svd.v).zip(&svd.values).enumerate() {
        let half = (s / scale).sqrt();
        a[k * weight.rows..][..weight.rows].iter_mut().zip(u).for_each(|(a, u)| *a = half * u);
        b.iter_mut().skip(k).step_by(rank).zip(v).for_each(|(b, v)| *b = half * v);
    }
    (a, b)
}

/// A [rank, inputs] and B [outputs, rank], of which B has orthonormal columns.
fn olora(weight: &Matrix, rank: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = || weight.values.chunks_exact(weight.cols);
    // Columns of W^T are rows of W.
    let q = orthonormal(rows().take(rank).map(<[f64]>::to_vec).collect());
    let a = q.iter().flat_map(|q| rows().map(|row| dot(q, row))).collect();
    let b = (0..weight.cols).flat_map(|column| q.iter().map(move |q| q[column])).collect();
    (a, b)
}

/// A [rank, inputs] and B [outputs, rank] with `B A = 0`, for an even rank.
fn orthogonal(rank: usize, (a, b): (&TensorSlot, &TensorSlot), seed: u64) -> (Vec<f64>, Vec<f64>) {
    let draw = |slot: &TensorSlot, what: u64| {
        let key = rng::key(&[seed, rng::name(&slot.name), what]);
        move |at: usize| f64::from(rng::normal(key, at as u64))
    };
    let (square, x, y) = (draw(a, 1), draw(a, 2), draw(b, 2));
    let q = orthonormal(
        (0..rank).map(|row| (0..rank).map(|column| square(row * rank + column)).collect()).collect(),
    );
    let half = rank / 2;
    let (inputs, outputs) = (a.shape[1], b.shape[0]);
    // Rows 0, 2, .. of Q for A, and 1, 3, .. for B.
    let sum = |drawn: &dyn Fn(usize) -> f64, line: usize, column: usize, first: usize| {
        (0..half).map(|k| drawn(line * half + k) * q[2 * k + first][column]).sum::<f64>() * SHRINK
    };
    let a = (0..rank).flat_map(|r| (0..inputs).map(move |i| (r, i))).map(|(r, i)| sum(&x, i, r, 0)).collect();
    let b =
        (0..outputs).flat_map(|j| (0..rank).map(move |r| (j, r))).map(|(j, r)| sum(&y, j, r, 1)).collect();
    (a, b)
}

#[cfg(test)]
#[path = "initial_tests.rs"]
mod tests;
