//! Gathers rows of a matrix into a smaller one, and scatters them back.

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

/// `to (m, c)`: row i is row `rows[i]` of `from (n, c)`; `rows (m)` ascend.
pub fn gather(from: View, rows: View, to: ViewMut, c: usize) {
    match to.device() {
        Device::Cpu => cpu::gather(from.host(), rows.host(), to.host(), c),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::gather(gpu, from, rows, to, c),
    }
}

/// `to (n, c)`: row `rows[i]` becomes row i of `from (m, c)`, all others stay; no row occurs twice.
pub fn scatter(from: View, rows: View, to: ViewMut, c: usize) {
    match to.device() {
        Device::Cpu => cpu::scatter(from.host(), rows.host(), to.host(), c),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::scatter(gpu, from, rows, to, c),
    }
}

/// [`scatter`] that sets all other rows to zero.
pub fn spread(from: View, rows: View, to: ViewMut, c: usize) {
    let mut to = to;
    to.reborrow().clear();
    scatter(from, rows, to, c);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_where_they_were() {
        // More rows than a task takes.
        for (n, c) in [(7, 3), (301, 5)] {
            let from: Vec<f32> = (0..n * c).map(|i| i as f32 + 1.0).collect();
            let rows: Vec<u32> = (0..n as u32).filter(|row| row % 7 == 2 || row % 5 == 1).collect();
            let mut some = vec![0f32; rows.len() * c];
            gather(from[..].into(), rows[..].into(), some.as_mut_slice().into(), c);
            for (at, &value) in some.iter().enumerate() {
                assert_eq!(value, from[rows[at / c] as usize * c + at % c]);
            }
            let mut back = vec![f32::NAN; n * c];
            spread(some[..].into(), rows[..].into(), back.as_mut_slice().into(), c);
            for (at, &value) in back.iter().enumerate() {
                let expected = if rows.contains(&((at / c) as u32)) { from[at] } else { 0.0 };
                assert_eq!(value, expected, "{n} x {c}, element {at}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "ascend")]
    fn a_row_named_twice_is_a_mistake() {
        let mut to = [0f32; 3];
        scatter([1f32, 2.0][..].into(), [1u32, 1][..].into(), to[..].as_mut().into(), 1);
    }
}
