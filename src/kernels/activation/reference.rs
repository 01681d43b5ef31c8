//! REFERENCE twin of the pointwise functions, in any precision.

use super::Activation;
use engraft_util::real::Real;

/// `f(x)` of one number.
pub fn forward<T: Real>(kind: Activation, x: T) -> T {
    let one = T::one();
    match kind {
        Activation::GeluTanh => T::of(0.5) * x * (one + inner(x).tanh()),
        Activation::Gelu => T::of(0.5) * x * (one + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf()),
        Activation::Relu => x.max(T::zero()),
        Activation::Silu => x / (one + (-x).exp()),
        Activation::Tanh => x.tanh(),
    }
}

/// `f'(x)` of one number.
pub fn derivative<T: Real>(kind: Activation, x: T) -> T {
    let (one, half) = (T::one(), T::of(0.5));
    match kind {
        Activation::GeluTanh => {
            let t = inner(x).tanh();
            let slope = T::of(SQRT_2_OVER_PI) * (one + T::of(3.0 * CUBE) * x * x);
            half * (one + t) + half * x * (one - t * t) * slope
        }
        Activation::Gelu => {
            let density = (-half * x * x).exp() * T::of(0.398_942_280_401_432_7);
            half * (one + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf()) + x * density
        }
        Activation::Relu if x > T::zero() => one,
        Activation::Relu => T::zero(),
        Activation::Silu => {
            let s = (one + (-x).exp()).recip();
            s * (one + x * (one - s))
        }
        Activation::Tanh => one - x.tanh() * x.tanh(),
    }
}

/// sqrt(2 / pi), the inner factor of the tanh approximation.
pub const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// The factor of x^3 in the tanh approximation.
pub const CUBE: f64 = 0.044_715;

fn inner<T: Real>(x: T) -> T {
    T::of(SQRT_2_OVER_PI) * (x + T::of(CUBE) * x * x * x)
}
