//! The twin, and rows of the op on a CPU.

use super::{Largest, NUMBERS, forward, reference::row};
use crate::device::{View, ViewMut};

#[test]
fn the_lowest_id_of_the_largest_logit_is_taken() {
    assert_eq!(row(&[1.0, 3.0, 3.0, -5.0]), Largest { id: 1, logit: 3.0 });
    assert_eq!(row(&[-0.0, 0.0]), Largest { id: 0, logit: -0.0 });
    assert_eq!(row(&[f32::MIN, f32::MIN]), Largest { id: 0, logit: f32::MIN });
}

#[test]
fn a_logit_that_is_not_finite_comes_first() {
    assert_eq!(row(&[1.0, f32::NEG_INFINITY, f32::INFINITY]).id, 1);
    let Largest { id, logit } = row(&[9.0, 1.0, f32::NAN, f32::INFINITY]);
    assert!(id == 2 && logit.is_nan());
}

#[test]
fn rows_are_told_apart() {
    let (logits, mut to) = ([0.0, 2.0, 1.0, 7.0, 6.0, 7.0], [9; 2 * NUMBERS]);
    forward(View::from(&logits[..]), ViewMut::from(&mut to[..]), 3);
    let found: Vec<_> = to.chunks(NUMBERS).filter_map(Largest::of).collect();
    assert_eq!(found, [Largest { id: 1, logit: 2.0 }, Largest { id: 0, logit: 7.0 }]);
}
