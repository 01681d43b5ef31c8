//! CUDA side: products by cuBLASLt, described by `device/gemm_layout.rs`; small batches by kernels that read each
//! weight once.
//!
//! FP16 and BF16 activations are multiplied with the weights in place: a base is brought to a device in that type. For FP32,
//! and for a base of codes, a range of rows of the weights is first widened into scratch ([`weights`]).

use super::device_scratch::SMALL_BATCH;
use super::{InitialValue, Matrix};
use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Call, Epilogue, Gpu, Grid, Image, SideMatrix, arguments, image, named},
    gemm_layout::{FactorLayout, GemmLayout},
};

mod weights;

pub use weights::{Codes, check_type};
use weights::{shares, stretches, whole, whole_address};

static IMAGE: Image = image!("matmul");

/// The part of an [`InitialValue`] that the product adds: factor and address of C, and a bias.
#[derive(Clone, Copy)]
struct Before {
    beta: f32,
    c: u64,
    bias: Option<u64>,
}

/// Prepares `y (n, cols)` for a product that is added to it. The epilogue takes a bias of y's own type alone.
fn before(gpu: &'static Gpu, start: InitialValue, y: &ViewMut, n: usize, cols: usize) -> Before {
    let here = y.address();
    let (residual, bias) = match start {
        InitialValue::Zero => return Before { beta: 0.0, c: here, bias: None },
        InitialValue::Keep => return Before { beta: 1.0, c: here, bias: None },
        InitialValue::Bias(bias) => (None, bias),
        InitialValue::Residual(residual, bias) => (Some(residual), bias),
    };
    if y.dtype() == DType::F16 {
        let beta = if residual.is_some() { 1.0 } else { 0.0 };
        return Before { beta, c: residual.map_or(here, |r| r.address()), bias: Some(bias.address()) };
    }
    let arguments = arguments![residual, bias, y, Argument::int(n), Argument::int(cols)];
    gpu.launch(&IMAGE, &named("product_start", y.dtype()), Grid::pointwise(n * cols), arguments);
    Before { beta: 1.0, c: here, bias: None }
}

/// `y (n, cols) = start + x (n, rows) W`, where rows of x are `ld` apart.
pub fn frozen_nn(
    gpu: &'static Gpu,
    (x, ld): (View, usize),
    w: Matrix,
    start: InitialValue,
    y: ViewMut,
    n: usize,
) {
    let (rows, cols, dtype) = (w.rows, w.cols, x.dtype());
    assert!(y.len() >= n * cols && y.dtype() == dtype, "shapes of a frozen product");
    assert!(n == 0 || x.len() >= (n - 1) * ld + rows, "shapes of a frozen product");
    check_type(w, dtype);
    if n <= SMALL_BATCH && ld == rows {
        return small_batch_nn(gpu, x, w, start, y, n);
    }
    let before = before(gpu, start, &y, n, cols);
    add_nn(gpu, (x, ld), w, before, &y, n);
}

/// `y (n, cols) = before + x (n, rows) W`.
fn add_nn(gpu: &'static Gpu, (x, ld): (View, usize), w: Matrix, before: Before, y: &ViewMut, n: usize) {
    let Before { beta, c, bias } = before;
    let (cols, dtype, d) = (w.cols, x.dtype(), y.address());
    stretches(gpu, w, dtype, |first, count, a| {
        let product =
            GemmLayout::of((n, cols, count), FactorLayout::plain(ld), FactorLayout::plain(cols), cols);
        let b = x.address() + (first * dtype.size()) as u64;
        // What is there before the product is added once.
        let (beta, c, bias) = if first == 0 { (beta, c, bias) } else { (1.0, d, None) };
        gpu.product(Call {
            product,
            a,
            b,
            factors: dtype,
            c,
            beta,
            d,
            result: dtype,
            bias,
            alpha: 1.0,
            epilogue: Epilogue::None,
        });
    });
}

/// `y (n, rows) = start + x (n, cols) W^T`, where rows of y are `ld` apart; y may be FP32 for every type of x.
pub fn frozen_nt(
    gpu: &'static Gpu,
    x: View,
    w: Matrix,
    start: InitialValue,
    (y, ld): (ViewMut, usize),
    n: usize,
) {
    let (rows, cols, dtype) = (w.rows, w.cols, x.dtype());
    assert!(x.len() >= n * cols, "shapes of a frozen product");
    assert!(n == 0 || y.len() >= (n - 1) * ld + rows, "shapes of a frozen product");
    check_type(w, dtype);
    if n <= SMALL_BATCH && y.dtype() == DType::F32 && matches!(start, InitialValue::Zero) {
        match Codes::of(w) {
            Some(Codes::Q8(codes)) => return codes.transposed_product(gpu, x, (&y, ld), n),
            // Decoding has no such product: a head of 4-bit codes does not exist.
            Some(Codes::Nf4(_)) => {}
            None => {
                let sizes = [n, rows, cols].map(Argument::int);
                let arguments = arguments![x, w.data, &y, sizes[0], sizes[1], sizes[2], Argument::long(ld)];
                let grid = Grid::row(rows.div_ceil(8), 256);
                return gpu.launch(&IMAGE, &named("gemv_nt", dtype), grid, arguments);
            }
        }
    }
    let Before { beta, c, bias } = before(gpu, start, &y, n, rows);
    let (d, result) = (y.address(), y.dtype());
    stretches(gpu, w, dtype, |first, count, a| {
        let product =
            GemmLayout::of((n, count, cols), FactorLayout::plain(cols), FactorLayout::transposed(cols), ld);
        let moved = |address: u64, size: usize| address + (first * size) as u64;
        let (c, d) = (moved(c, result.size()), moved(d, result.size()));
        let bias = bias.map(|bias| moved(bias, DType::F16.size()));
        let b = x.address();
        gpu.product(Call {
            product,
            a,
            b,
            factors: dtype,
            c,
            beta,
            d,
            result,
            bias,
            alpha: 1.0,
            epilogue: Epilogue::None,
        });
    });
}

/// `y (n, cols) += x (n, rows) W + bias` of more than [`SMALL_BATCH`] rows; FP16 where there is a bias.
pub fn add_frozen_nn(gpu: &'static Gpu, x: View, w: Matrix, bias: Option<View>, y: ViewMut, n: usize) {
    assert!(x.len() >= n * w.rows && y.len() >= n * w.cols, "shapes of a frozen product");
    assert!(bias.is_none() || y.dtype() == DType::F16, "a bias of the product's own type");
    check_type(w, x.dtype());
    let before = Before { beta: 1.0, c: y.address(), bias: bias.map(|bias| bias.address()) };
    add_nn(gpu, (x, w.rows), w, before, &y, n);
}

/// A product with GELU: `z (n, cols) = before + x (n, rows) W` goes to `y`, gelu(z) to `activated`.
pub struct GeluProduct<'a> {
    x: View<'a>,
    w: Matrix<'a>,
    y: u64,
    activated: u64,
    n: usize,
}

impl<'a> GeluProduct<'a> {
    /// The product, if the library has one with and without a summand and `bias`: not with FP32 activations, nor where
    /// columns are no multiple of 8. Few rows have kernels of their own.
    pub fn new(
        gpu: &'static Gpu,
        x: View<'a>,
        w: Matrix<'a>,
        bias: Option<View>,
        (y, activated): (&ViewMut, &ViewMut),
        n: usize,
    ) -> Option<Self> {
        assert!(y.len() >= n * w.cols && activated.len() >= n * w.cols, "shapes of a frozen product");
        check_type(w, x.dtype());
        let one = Self { x, w, y: y.address(), activated: activated.address(), n };
        let bias = bias.map(|bias| bias.address());
        let a = whole_address(w, x.dtype())?;
        let call = |beta| one.call(a, Before { beta, c: one.activated, bias });
        let has = n > SMALL_BATCH && [0.0, 1.0].iter().all(|&beta| has(gpu, &call(beta)));
        has.then_some(one)
    }

    fn call(&self, a: u64, before: Before) -> Call {
        let &Self { x, w, y, activated, n } = self;
        let Before { beta, c, bias } = before;
        let epilogue = Epilogue::Gelu(SideMatrix { address: y, ld: w.cols });
        let (product, dtype) = (GemmLayout::nn(n, w.rows, w.cols), x.dtype());
        let (b, d) = (x.address(), activated);
        Call { product, a, b, factors: dtype, alpha: 1.0, c, beta, d, result: dtype, bias, epilogue }
    }

    fn run(&self, gpu: &'static Gpu, before: Before) {
        whole(gpu, self.w, self.x.dtype(), |a| gpu.product(self.call(a, before)));
    }

    /// `before` is what `activated` holds, plus an FP16 bias.
    pub fn add(self, gpu: &'static Gpu, bias: Option<View>) {
        let bias = bias.map(|bias| bias.address());
        self.run(gpu, Before { beta: 1.0, c: self.activated, bias });
    }
}

/// [`super::frozen_nn_activated`] with GELU as one product; false, with nothing done, where there is no such product.
pub fn frozen_nn_gelu(
    gpu: &'static Gpu,
    x: View,
    w: Matrix,
    start: InitialValue,
    (y, activated): (ViewMut, ViewMut),
    n: usize,
) -> bool {
    let bias = match start {
        InitialValue::Keep => return false,
        InitialValue::Zero => None,
        InitialValue::Bias(bias) | InitialValue::Residual(_, bias) => Some(bias),
    };
    let bias = bias.filter(|_| y.dtype() == DType::F16);
    let Some(product) = GeluProduct::new(gpu, x, w, bias, (&y, &activated), n) else { return false };
    // The start is added in the place of the result; y is written by the epilogue alone.
    let before = before(gpu, start, &activated, n, w.cols);
    product.run(gpu, before);
    true
}

/// [`super::frozen_nt_derived`] with GELU as one product; false, with nothing done, where the product has no such epilogue.
pub fn frozen_nt_gelu_gradient(
    gpu: &'static Gpu,
    dy: View,
    w: Matrix,
    start: InitialValue,
    (d, x): (ViewMut, View),
    n: usize,
) -> bool {
    let (rows, cols, dtype) = (w.rows, w.cols, dy.dtype());
    assert!(dy.len() >= n * cols, "shapes of a frozen product");
    check_type(w, dtype);
    assert!(d.len() >= n * rows && x.len() >= n * rows, "shapes of a frozen product");
    let beta = match start {
        InitialValue::Zero => 0.0,
        InitialValue::Keep => 1.0,
        InitialValue::Bias(_) | InitialValue::Residual(..) => return false,
    };
    let side = SideMatrix { address: x.address(), ld: rows };
    let Some(a) = whole_address(w, dtype) else { return false };
    let (b, d) = (dy.address(), d.address());
    let call = Call {
        product: GemmLayout::nt(n, rows, cols),
        a,
        b,
        factors: dtype,
        alpha: 1.0,
        c: d,
        beta,
        d,
        result: dtype,
        bias: None,
        epilogue: Epilogue::GeluGradient(side),
    };
    if n == 0 || !has(gpu, &call) {
        return false;
    }
    whole(gpu, w, dtype, |a| gpu.product(Call { a, ..call }));
    true
}

/// Whether the library has a product with an epilogue.
fn has(gpu: &'static Gpu, call: &Call) -> bool {
    gpu.fuses() && call.epilogue.is_taken(call.result) && gpu.has_product(call)
}

/// `to (rows, cols) += alpha left^T right` of `left (n, rows)`, whose rows are `lefts` apart, and `right (n, cols)`, whose
/// rows are `rights` apart; `to` is FP32.
pub fn add_transposed_product(
    gpu: &'static Gpu,
    (left, lefts): (View, usize),
    (right, rights): (View, usize),
    alpha: f32,
    to: ViewMut,
    (n, rows, cols): Sizes,
) {
    assert!(left.dtype() == right.dtype() && to.dtype() == DType::F32, "types of a gradient");
    assert!(
        left.len() >= n * lefts && right.len() >= n * rights && to.len() >= rows * cols,
        "shapes of a gradient"
    );
    let product =
        GemmLayout::of((rows, cols, n), FactorLayout::transposed(lefts), FactorLayout::plain(rights), cols);
    let (a, b, d) = (right.address(), left.address(), to.address());
    gpu.product(Call {
        product,
        a,
        b,
        factors: left.dtype(),
        alpha,
        c: d,
        beta: 1.0,
        d,
        result: DType::F32,
        bias: None,
        epilogue: Epilogue::None,
    });
}

/// Residual and bias of a product of a small batch.
pub fn operands(start: InitialValue, y: &ViewMut) -> (Argument, Argument) {
    match start {
        InitialValue::Zero => (Argument::NULL, Argument::NULL),
        InitialValue::Keep => (Argument::from(y), Argument::NULL),
        InitialValue::Bias(bias) => (Argument::NULL, Argument::from(bias)),
        InitialValue::Residual(residual, bias) => (Argument::from(residual), Argument::from(bias)),
    }
}

fn small_batch_nn(gpu: &'static Gpu, x: View, w: Matrix, start: InitialValue, y: ViewMut, n: usize) {
    let (cols, dtype) = (w.cols, x.dtype());
    let (residual, bias) = operands(start, &y);
    shares(gpu, x, w, n, |parts, splits| {
        let [splits, n_, cols_] = [splits, n, cols].map(Argument::int);
        let arguments = arguments![parts, splits, residual, bias, &y, n_, cols_];
        let grid = Grid::row((n * cols).div_ceil(256), 256);
        gpu.launch(&IMAGE, &named("gemv_nn_finish", dtype), grid, arguments);
    });
}

type Sizes = (usize, usize, usize);

/// A dense product of FP32 matrices.
fn dense(gpu: &'static Gpu, product: GemmLayout, a: View, b: View, d: &ViewMut, beta: f32) {
    let (a, b, d) = (a.address(), b.address(), d.address());
    let (factors, result) = (DType::F32, DType::F32);
    gpu.product(Call {
        product,
        a,
        b,
        factors,
        c: d,
        beta,
        d,
        result,
        bias: None,
        alpha: 1.0,
        epilogue: Epilogue::None,
    });
}

pub fn dense_forward(gpu: &'static Gpu, x: View, w: View, b: View, y: ViewMut, (n, inputs, outputs): Sizes) {
    assert!(x.len() == n * inputs && w.len() == inputs * outputs && y.len() == n * outputs, "dense shapes");
    let arguments = arguments![b, &y, Argument::int(n), Argument::int(outputs)];
    gpu.launch(&IMAGE, "dense_start", Grid::pointwise(n * outputs), arguments);
    dense(gpu, GemmLayout::nt(n, outputs, inputs), w, x, &y, 1.0);
}

pub fn dense_backward(
    gpu: &'static Gpu,
    dy: View,
    x: View,
    (dw, db): (ViewMut, ViewMut),
    (n, inputs, outputs): Sizes,
) {
    assert!(dy.len() == n * outputs && x.len() == n * inputs && dw.len() == inputs * outputs, "dense shapes");
    let arguments = arguments![dy, &db, Argument::int(n), Argument::int(outputs)];
    gpu.launch(&IMAGE, "column_sum", Grid::row(outputs.div_ceil(256), 256), arguments);
    dense(gpu, GemmLayout::tn(n, inputs, outputs), x, dy, &dw, 1.0);
}

pub fn dense_input_gradient(
    gpu: &'static Gpu,
    dy: View,
    w: View,
    dx: ViewMut,
    (n, inputs, outputs): Sizes,
    accumulate: bool,
) {
    assert!(dy.len() == n * outputs && w.len() == inputs * outputs && dx.len() == n * inputs, "dense shapes");
    dense(gpu, GemmLayout::nn(n, outputs, inputs), w, dy, &dx, if accumulate { 1.0 } else { 0.0 });
}
