//! CUDA side: a block of threads for each block of elements.

use super::{
    BLOCK, Moments, Piece,
    codebook::{SIGNED, UNSIGNED},
};
use crate::{
    device::{
        View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image},
    },
    kernels::adamw::{self, Update, cpu::Factors},
};

static IMAGE: Image = image!("adamw8");

/// Consecutive pieces of one kind for one launch: every block but the last is whole.
fn runs(pieces: &[Piece]) -> Vec<Piece> {
    let mut runs: Vec<Piece> = Vec::new();
    for piece in pieces {
        match runs.last_mut() {
            Some(run) if run.coded == piece.coded && (!run.coded || run.len.is_multiple_of(BLOCK)) => {
                run.len += piece.len;
            }
            _ => runs.push(*piece),
        }
    }
    runs
}

pub fn update(
    gpu: &'static Gpu,
    values: ViewMut,
    gradient: View,
    moments: Moments,
    pieces: &[Piece],
    u: Update,
) {
    let Moments {
        mut first,
        mut second,
        mut first_codes,
        mut first_scales,
        mut second_codes,
        mut second_scales,
    } = moments;
    let mut values = values;
    let (mut start, mut wide, mut coded, mut block) = (0, 0, 0, 0);
    for run in runs(pieces) {
        let len = run.len;
        let (own, gradient) = (values.reborrow().slice(start, len), gradient.slice(start, len));
        start += len;
        if !run.coded {
            let (m, v) = (first.reborrow().slice(wide, len), second.reborrow().slice(wide, len));
            adamw::cuda::update(gpu, own, gradient, m, v, u);
            wide += len;
            continue;
        }
        let codes = [&mut first_codes, &mut second_codes].map(|codes| codes.reborrow().slice(coded, len));
        let scales = [&mut first_scales, &mut second_scales].map(|s| s.reborrow().slice(block, run.blocks()));
        coded += len;
        block += run.blocks();
        launch(gpu, own, gradient, codes, scales, u);
    }
}

fn launch(
    gpu: &'static Gpu,
    values: ViewMut,
    gradient: View,
    [m_codes, v_codes]: [ViewMut; 2],
    [m_scales, v_scales]: [ViewMut; 2],
    u: Update,
) {
    let count = values.len();
    let factors = Argument::structure(Factors::new(u).on_device());
    let books = || [SIGNED.values, UNSIGNED.values].concat();
    gpu.control(|control| {
        gpu.table("books of 8-bit moments", books, |books| {
            let arguments = arguments![
                &values,
                gradient,
                &m_codes,
                &m_scales,
                &v_codes,
                &v_scales,
                Argument::long(count),
                factors,
                control,
                books,
            ];
            gpu.launch(&IMAGE, "adamw8", Grid::row(count.div_ceil(BLOCK), 256), arguments);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_blocks_would_begin_anew() {
        let piece = |len, coded| Piece { len, coded };
        let pieces = [
            piece(512, true),
            piece(300, true),
            piece(256, true),
            piece(100, false),
            piece(7, false),
            piece(5000, true),
        ];
        assert_eq!(runs(&pieces), [piece(812, true), piece(256, true), piece(107, false), piece(5000, true)]);
    }
}
