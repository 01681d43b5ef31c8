//! Casts between element types, flat sums, and activations, against their twins.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::{
    activation::{Activation as Kind, reference},
    noise::{self, Noise},
};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    cast_f32_f16_launch,
    cast_f32_bf16_launch,
    cast_f16_f32_launch,
    cast_bf16_f32_launch,
    cast_f16_bf16_launch,
    add_f32_launch,
    scale_f32_launch,
    activation_forward_f32_launch,
    activation_forward_f16_launch,
    activation_forward_bf16_launch,
    activation_backward_f32_launch,
    activation_backward_f16_launch,
    activation_backward_bf16_launch,
    noise_f32_launch,
    noise_f16_launch,
    noise_bf16_launch,
);

/// Numbers of elements that are no multiple of a vector, and more than a block takes.
const COUNTS: [usize; 3] = [1, 7, 4099];

fn grid(count: usize) -> [usize; 3] {
    [count.div_ceil(2048), 1, 1]
}

fn cast<A: Number, B: Number>(kernel: Launcher, to: fn(A) -> B) {
    for count in COUNTS {
        let mut values = numbers(1, count);
        // Ties, values that overflow, subnormal ones and zero.
        let special =
            [0.0, -0.0, 1.0 + 2f64.powi(-11), 1.0 + 3.0 * 2f64.powi(-9), 65519.0, 65520.0, 1e-7, -3e38];
        values.iter_mut().zip(special).for_each(|(value, special)| *value = special);
        // Starts at the second element, so that vectors are not aligned.
        for shift in [0, 1] {
            let (x, y) = (Device::<A>::of(&values), Device::<B>::poisoned(count));
            run(kernel, grid(count), 256, 0, 1, args![x.at(shift), y.at(shift), (count - shift) as i64]);
            let expected = x.get().into_iter().map(to);
            assert!(y.get().iter().zip(expected).skip(shift).all(|(&y, expected)| y.same(expected)));
        }
    }
}

#[test]
fn casts_round_to_nearest_even() {
    cast::<f32, f16>(cast_f32_f16_launch, f16::from_f32);
    cast::<f32, bf16>(cast_f32_bf16_launch, bf16::from_f32);
    cast::<f16, f32>(cast_f16_f32_launch, f16::to_f32);
    cast::<bf16, f32>(cast_bf16_f32_launch, bf16::to_f32);
    cast::<f16, bf16>(cast_f16_bf16_launch, |x| bf16::from_f32(x.to_f32()));
}

#[test]
fn flat_sums_and_factors() {
    for count in COUNTS {
        let (from, to) = (Device::<f32>::of(&numbers(1, count)), Device::<f32>::of(&numbers(2, count)));
        let before = to.get();
        run(add_f32_launch, grid(count), 256, 0, 1, args![from.head(), to.head(), count as i64]);
        run(scale_f32_launch, grid(count), 256, 0, 1, args![to.head(), -0.3f32, count as i64]);
        let expected = before.iter().zip(from.get()).map(|(a, b)| (a + b) * -0.3);
        assert!(to.get().into_iter().eq(expected));
    }
}

fn activations<T: Activation>(forward: Launcher, backward: Launcher) {
    let kinds = [Kind::GeluTanh, Kind::Gelu, Kind::Relu, Kind::Silu, Kind::Tanh];
    let count = 2057;
    let mut x = rounded::<T>(1, count).into_iter().map(|x| T::of(6.0 * x).wide()).collect::<Vec<_>>();
    // The largest values of FP16 overflow the square in the derivative's slope, or its product in half.
    x[..4].copy_from_slice(&[0.0, 64992.0, -64992.0, 300.0].map(|x| T::of(x).wide()));
    let d = rounded::<T>(2, count);
    for (index, kind) in kinds.into_iter().enumerate() {
        let (x_in, y, gradient) = (Device::<T>::of(&x), Device::<T>::poisoned(count), Device::<T>::of(&d));
        let number = index as i32;
        run(forward, grid(count), 256, 0, 1, args![number, x_in.head(), y.head(), count as i64]);
        run(backward, grid(count), 256, 0, 1, args![number, x_in.head(), gradient.head(), count as i64]);
        let expected: Vec<f64> = x.iter().map(|&x| reference::forward(kind, x)).collect();
        let tolerance = T::ROUNDING + 1e-6;
        assert_close(&y.wide(), &expected, tolerance, "y");
        let slope = x.iter().zip(&d).map(|(&x, d)| d * reference::derivative(kind, x));
        assert_close(&gradient.wide(), &slope.collect::<Vec<_>>(), tolerance, "d");
    }
}

#[test]
fn activations_match_their_twin() {
    activations::<f32>(activation_forward_f32_launch, activation_backward_f32_launch);
    activations::<f16>(activation_forward_f16_launch, activation_backward_f16_launch);
    activations::<bf16>(activation_forward_bf16_launch, activation_backward_bf16_launch);
}

fn check_noise<T: Activation>(kernel: Launcher, n: usize, c: usize) {
    let noise =
        Noise { key: 0x1234_5678_9abc_def1, magnitude: 0.7, first_row: 3, seq_len: 5, stride: 9, vocab: 20 };
    let ids: Vec<u32> = (0..n as u32).map(|at| at * 7 % 23).collect();
    let x = rounded::<T>(1, n * c);
    let (ids_in, x_out) = (Device::<u32>::new(&ids), Device::<T>::of(&x));
    let [first_row, seq_len, stride, vocab, c_] =
        [noise.first_row, noise.seq_len, noise.stride, noise.vocab, c].map(|size| size as i32);
    let (key, magnitude) = (noise.key, noise.magnitude);
    let args = args![ids_in.head(), x_out.head(), key, magnitude, first_row, seq_len, stride, vocab, c_];
    run(kernel, [n, 1, 1], 128, 0, 1, args);
    assert_close(&x_out.wide(), &noise::reference::add(noise, &ids, &x), T::ROUNDING + 1e-7, "x");
}

#[test]
fn noise_is_that_of_the_host() {
    for (n, c) in [(1, 5), (7, 131), (33, 1043)] {
        check_noise::<f32>(noise_f32_launch, n, c);
        check_noise::<f16>(noise_f16_launch, n, c);
        check_noise::<bf16>(noise_bf16_launch, n, c);
    }
}
