//! REFERENCE twin, in any precision, written out element by element.

use std::ops::Range;

use engraft_util::real::Real;

/// An adapted linear layer for n tokens. Vectors are whole: 1 where the op has none.
pub struct Site<'a, T> {
    /// Number n of tokens, the rows of x and y.
    pub n: usize,
    /// Width of x, `inputs`.
    pub inputs: usize,
    /// Width of y, `outputs`.
    pub outputs: usize,
    /// `W (in, out)`.
    pub w: &'a [T],
    /// `b (out)`.
    pub bias: &'a [T],
    /// `u (in)` of every token `(n, in)`.
    pub u: Option<&'a [T]>,
    /// `g (out)` of every token `(n, out)`.
    pub g: Option<&'a [T]>,
    /// Whether g multiplies the bias.
    pub bias_inside: bool,
    /// Low-rank deltas, added in this order.
    pub deltas: Vec<Delta<'a, T>>,
}

/// A delta of a [`Site`].
#[derive(Clone)]
pub struct Delta<'a, T> {
    /// `A (r, in)`.
    pub a: &'a [T],
    /// `B (columns, r)`.
    pub b: &'a [T],
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Output columns that it adds to.
    pub columns: Range<usize>,
    /// Tokens that it is for.
    pub tokens: Range<usize>,
    /// Factor s of the delta.
    pub scale: T,
    /// `d (r)`.
    pub d: Option<&'a [T]>,
    /// `e (columns)`.
    pub e: Option<&'a [T]>,
    /// Dropout factors `(n, in)`.
    pub dropped: Option<&'a [T]>,
}

/// Gradients of a [`Site`].
pub struct Gradients<T> {
    /// Of the input `(n, in)`.
    pub x: Vec<T>,
    /// Of u, of every token `(n, in)`.
    pub u: Vec<T>,
    /// Of g, of every token `(n, out)`.
    pub g: Vec<T>,
    /// Of the bias `(out)`.
    pub bias: Vec<T>,
    /// Gradients of each delta's factors.
    pub deltas: Vec<DeltaGradients<T>>,
}

/// Gradients of a [`Delta`].
pub struct DeltaGradients<T> {
    /// Gradient of A `(r, inputs)`.
    pub a: Vec<T>,
    /// Gradient of B `(columns, r)`.
    pub b: Vec<T>,
    /// Of d `(r)`.
    pub d: Vec<T>,
    /// Of e `(columns)`.
    pub e: Vec<T>,
}

fn at<T: Real>(vector: Option<&[T]>, index: usize) -> T {
    vector.map_or(T::one(), |vector| vector[index])
}

impl<T: Real> Delta<'_, T> {
    fn dropped(&self, x: &[T], index: usize) -> T {
        x[index] * at(self.dropped, index)
    }

    /// Element r of `drop(x) A^T` of a token.
    fn xa(&self, x: &[T], inputs: usize, token: usize, r: usize) -> T {
        (0..inputs).map(|i| self.dropped(x, token * inputs + i) * self.a[r * inputs + i]).sum()
    }

    /// The delta of a token, without scale and e.
    fn output(&self, x: &[T], inputs: usize, token: usize, column: usize) -> T {
        let term = |r| self.xa(x, inputs, token, r) * at(self.d, r) * self.b[column * self.rank + r];
        (0..self.rank).map(term).sum()
    }
}

impl<T: Real> Site<'_, T> {
    /// The product `(n, outputs)` that g multiplies.
    fn product(&self, x: &[T]) -> Vec<T> {
        let mut z = Vec::with_capacity(self.n * self.outputs);
        for (token, j) in (0..self.n).flat_map(|token| (0..self.outputs).map(move |j| (token, j))) {
            let input = |i: usize| x[token * self.inputs + i] * at(self.u, token * self.inputs + i);
            let mut sum = (0..self.inputs).map(|i| input(i) * self.w[i * self.outputs + j]).sum::<T>();
            if self.bias_inside {
                sum += self.bias[j];
            }
            for delta in &self.deltas {
                if delta.tokens.contains(&token) && delta.columns.contains(&j) {
                    let column = j - delta.columns.start;
                    sum += delta.scale * at(delta.e, column) * delta.output(x, self.inputs, token, column);
                }
            }
            z.push(sum);
        }
        z
    }
}

/// `y (n, out)`, without a residual.
pub fn forward<T: Real>(site: &Site<T>, x: &[T]) -> Vec<T> {
    let outside = |j: usize| if site.bias_inside { T::zero() } else { site.bias[j] };
    let z = site.product(x).into_iter().enumerate();
    z.map(|(index, z)| at(site.g, index) * z + outside(index % site.outputs)).collect()
}

/// Gradients of [`forward`].
pub fn backward<T: Real>(site: &Site<T>, x: &[T], dy: &[T]) -> Gradients<T> {
    let (n, inputs, outputs) = (site.n, site.inputs, site.outputs);
    let g: Vec<T> = site.product(x).iter().zip(dy).map(|(&z, &dy)| z * dy).collect();
    let dz: Vec<T> = dy.iter().enumerate().map(|(index, &dy)| at(site.g, index) * dy).collect();
    let d_bias = if site.bias_inside { &dz[..] } else { dy };
    let bias = (0..outputs).map(|j| (0..n).map(|token| d_bias[token * outputs + j]).sum()).collect();
    let (mut d_x, mut u) = (vec![T::zero(); n * inputs], vec![T::zero(); n * inputs]);
    for index in 0..n * inputs {
        let (token, i) = (index / inputs, index % inputs);
        let back: T = (0..outputs).map(|j| dz[token * outputs + j] * site.w[i * outputs + j]).sum();
        u[index] = x[index] * back;
        d_x[index] = at(site.u, index) * back;
    }
    let deltas = site.deltas.iter().map(|delta| delta_backward(site, delta, x, &dz, &mut d_x)).collect();
    Gradients { x: d_x, u, g, bias, deltas }
}

/// Gradients of one delta; adds to that of the input.
fn delta_backward<T: Real>(
    site: &Site<T>,
    delta: &Delta<T>,
    x: &[T],
    dz: &[T],
    d_x: &mut [T],
) -> DeltaGradients<T> {
    let (inputs, rank, columns) = (site.inputs, delta.rank, delta.columns.len());
    let zeros = |len: usize| vec![T::zero(); len];
    let mut to = DeltaGradients {
        a: zeros(rank * inputs),
        b: zeros(columns * rank),
        d: zeros(rank),
        e: zeros(columns),
    };
    for token in delta.tokens.clone() {
        let dz = |column: usize| delta.scale * dz[token * site.outputs + delta.columns.start + column];
        for column in 0..columns {
            to.e[column] += dz(column) * delta.output(x, inputs, token, column);
        }
        for r in 0..rank {
            let (xa, d) = (delta.xa(x, inputs, token, r), at(delta.d, r));
            let back: T = (0..columns).map(|j| dz(j) * at(delta.e, j) * delta.b[j * rank + r]).sum();
            to.d[r] += back * xa;
            for column in 0..columns {
                to.b[column * rank + r] += dz(column) * at(delta.e, column) * xa * d;
            }
            for i in 0..inputs {
                let index = token * inputs + i;
                to.a[r * inputs + i] += back * d * delta.dropped(x, index);
                d_x[index] += back * d * delta.a[r * inputs + i] * at(delta.dropped, index);
            }
        }
    }
    to
}
