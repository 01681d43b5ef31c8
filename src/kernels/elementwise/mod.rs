//! Conversion between types of activations, and sums of flat stores.

use half::{bf16, f16};

use crate::device::{DType, Device, View, ViewMut};

#[cfg(feature = "cuda")]
pub(super) mod cuda;

/// `to = from`, rounded to the nearest value of its type, of two equally near ones to the even one; for F32,
/// F16 and BF16, one of them F32.
pub fn cast(from: View, to: ViewMut) {
    match to.device() {
        Device::Cpu => cast_on_host(from, to),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::cast(gpu, from, &to),
    }
}

fn cast_on_host(from: View, to: ViewMut) {
    fn each<A: Copy, B>(from: &[A], to: &mut [B], convert: impl Fn(A) -> B) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = convert(*from));
    }
    match (from.dtype(), to.dtype()) {
        (DType::F16, _) => each(from.host(), to.host(), f16::to_f32),
        (DType::BF16, _) => each(from.host(), to.host(), bf16::to_f32),
        (_, DType::F16) => each(from.host(), to.host(), f16::from_f32),
        (_, DType::BF16) => each(from.host(), to.host(), bf16::from_f32),
        _ => to.host::<f32>().copy_from_slice(from.host()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_nearest_even() {
        let values = [1.0f32, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 1e6, -0.1];
        let mut rounded = [f16::ZERO; 5];
        cast(values[..].into(), rounded[..].as_mut().into());
        assert_eq!(
            rounded[..3].iter().map(|value| value.to_f32()).collect::<Vec<_>>(),
            [1.0, 1.0, 1.0 + 1.0 / 512.0]
        );
        assert!(rounded[3].is_infinite());
        let mut back = [0f32; 5];
        cast(rounded[..].into(), back[..].as_mut().into());
        assert_eq!(back[4], f16::from_f32(-0.1).to_f32());
    }
}
