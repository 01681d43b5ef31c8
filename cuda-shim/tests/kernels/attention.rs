//! Attention forward and backward, plain and on tensor cores, against the twin head by head: batch, heads,
//! packed documents, prefix, cache, and sizes that are no multiple of a tile.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::attention::reference::{self, Shape as Head};
use half::{bf16, f16};

use crate::{args, harness::*};

macro_rules! attention {
    ($($type:ident:
        $forward:ident $dq:ident $dkv:ident, $delta:ident $append:ident $decode:ident $finish:ident;
    )*) => {
        kernels!($($forward, $dq, $dkv, $delta, $append, $decode, $finish,)* attention_sum_prefix_launch);
        const PLAIN: [Kernels; 3] = [$(Kernels {
            forward: $forward,
            dq: $dq,
            dkv: $dkv,
            delta: $delta,
            append: $append,
            decode: $decode,
            finish: $finish,
        }),*];
    };
}
attention!(
    f32: attention_forward_f32_launch attention_dq_f32_launch attention_dkv_f32_launch,
        attention_delta_f32_launch attention_append_f32_launch attention_decode_f32_launch
        attention_decode_finish_f32_launch;
    f16: attention_forward_f16_launch attention_dq_f16_launch attention_dkv_f16_launch,
        attention_delta_f16_launch attention_append_f16_launch attention_decode_f16_launch
        attention_decode_finish_f16_launch;
    bf16: attention_forward_bf16_launch attention_dq_bf16_launch attention_dkv_bf16_launch,
        attention_delta_bf16_launch attention_append_bf16_launch attention_decode_bf16_launch
        attention_decode_finish_bf16_launch;
);
kernels!(
    attention_forward_mma_f16_launch,
    attention_dq_mma_f16_launch,
    attention_dkv_mma_f16_launch,
    attention_forward_mma_bf16_launch,
    attention_dq_mma_bf16_launch,
    attention_dkv_mma_bf16_launch,
);

#[derive(Clone, Copy)]
struct Kernels {
    forward: Launcher,
    dq: Launcher,
    dkv: Launcher,
    delta: Launcher,
    append: Launcher,
    decode: Launcher,
    finish: Launcher,
}

impl Kernels {
    fn plain<T: Activation>() -> Self {
        PLAIN[T::INDEX]
    }

    fn tensor<T: Activation>() -> Self {
        let plain = Self::plain::<T>();
        match T::INDEX {
            1 => Self {
                forward: attention_forward_mma_f16_launch,
                dq: attention_dq_mma_f16_launch,
                dkv: attention_dkv_mma_f16_launch,
                ..plain
            },
            2 => Self {
                forward: attention_forward_mma_bf16_launch,
                dq: attention_dq_mma_bf16_launch,
                dkv: attention_dkv_mma_bf16_launch,
                ..plain
            },
            _ => panic!("no tensor cores for FP32"),
        }
    }
}

/// The structs that the kernels take.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Heads<T> {
    pub data: *mut T,
    pub row: i64,
    pub batch: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shape {
    pub batch: i32,
    pub queries: i32,
    pub past: i32,
    pub heads: i32,
    pub width: i32,
    pub prefix: i32,
    pub scale: f32,
}

const SCALE: f32 = 0.3;

/// Sizes of a call, and how the kernels are launched.
#[derive(Clone, Copy)]
struct Case<'a> {
    batch: usize,
    t: usize,
    heads: usize,
    width: usize,
    p: usize,
    starts: &'a [u32],
    tensor: bool,
    seed: u64,
}

impl Case<'_> {
    fn c(&self) -> usize {
        self.heads * self.width
    }

    fn shape(&self, queries: usize, past: usize) -> Shape {
        let [batch, heads, width, prefix] = [self.batch, self.heads, self.width, self.p].map(|x| x as i32);
        Shape { batch, queries: queries as i32, past: past as i32, heads, width, prefix, scale: SCALE }
    }

    /// Blocks for `rows` queries.
    fn grid(&self, rows: usize) -> [usize; 3] {
        [rows.div_ceil(if self.tensor { 128 } else { 4 }), self.heads, self.batch]
    }

    fn grid_of_keys(&self) -> [usize; 3] {
        let tiles = self.p.div_ceil(64) + self.t.div_ceil(64);
        if self.tensor { [tiles, self.heads, self.batch] } else { self.grid(self.p + self.t) }
    }

    /// Bytes of shared memory for so many vectors a warp.
    fn dynamic(&self, vectors: usize) -> usize {
        if self.tensor { 0 } else { 16 * vectors * self.width }
    }

    fn twin(&self, queries: usize, past: usize) -> Head {
        Head { queries, past, prefix: self.p, width: self.width }
    }
}

/// Rows of `width` numbers at column `at` of rows that are `row` numbers apart.
fn columns(data: &[f64], row: usize, at: usize, width: usize) -> Vec<f64> {
    data.chunks(row).flat_map(|row| row[at..at + width].to_vec()).collect()
}

/// The tolerance for a type's rounding of probabilities and results.
fn tolerance<T: Activation>() -> f64 {
    3.0 * T::ROUNDING + 1e-5
}

/// Operands of a call over packed qkv, the prefix in two parts of rows of 2c.
struct Operands<T> {
    qkv: Device<T>,
    prefix: Device<T>,
    starts: Device<u32>,
}

impl<T: Activation> Operands<T> {
    fn new(case: Case) -> (Self, Vec<f64>, Vec<f64>) {
        let qkv = rounded::<T>(1, case.batch * case.t * 3 * case.c());
        let prefix = rounded::<T>(2, case.p * 2 * case.c());
        let starts: Vec<f64> = case.starts.iter().map(|&start| f64::from(start)).collect();
        (
            Self { qkv: Device::of(&qkv), prefix: Device::of(&prefix), starts: Device::of(&starts) },
            qkv,
            prefix,
        )
    }

    fn part(&self, case: Case, index: usize) -> Heads<T> {
        let (c, t) = (case.c(), case.t);
        Heads { data: self.qkv.at(index * c), row: 3 * c as i64, batch: (t * 3 * c) as i64 }
    }

    fn prompt(&self, case: Case, index: usize) -> Heads<T> {
        let c = case.c();
        let data = if case.p == 0 { std::ptr::null_mut() } else { self.prefix.at(index * c) };
        Heads { data, row: 2 * c as i64, batch: 0 }
    }
}

fn check<T: Activation>(case: Case) {
    let Case { batch, t, heads, width, p, starts, tensor, seed } = case;
    let kernels = if tensor { Kernels::tensor::<T>() } else { Kernels::plain::<T>() };
    let (c, shape) = (case.c(), case.shape(t, 0));
    let (operands, qkv, prompt) = Operands::<T>::new(case);
    let [q, k, v] = [0, 1, 2].map(|index| operands.part(case, index));
    let [pk, pv] = [0, 1].map(|index| operands.prompt(case, index));
    let (out, lse) = (Device::<T>::poisoned(batch * t * c), Device::<f32>::poisoned(batch * heads * t));
    let at = operands.starts.head();
    run(
        kernels.forward,
        case.grid(t),
        128,
        case.dynamic(2),
        seed,
        args![q, k, v, pk, pv, at, shape, out.head(), lse.head()],
    );

    let dout = rounded::<T>(4, batch * t * c);
    let (d, delta) = (Device::<T>::of(&dout), Device::<f32>::poisoned(batch * heads * t));
    let sizes = [batch, t, heads, width].map(|x| x as i32);
    let (d_qkv, parts) = (Device::<T>::poisoned(qkv.len()), Device::<f32>::poisoned(batch * 2 * p * c));
    let (lse_in, to) = (lse.head(), d_qkv.head());
    if tensor {
        // It makes delta itself.
        let args = args![q, k, v, pk, pv, at, shape, d.head(), out.head(), lse_in, delta.head(), to];
        run(kernels.dq, case.grid(t), 128, 0, seed, args);
    } else {
        let args = args![d.head(), out.head(), delta.head(), sizes[0], sizes[1], sizes[2], sizes[3]];
        run(kernels.delta, [(batch * t * heads).div_ceil(4), 1, 1], 128, 0, seed, args);
        let args = args![q, k, v, pk, pv, at, shape, d.head(), lse_in, delta.head(), to];
        run(kernels.dq, case.grid(t), 128, case.dynamic(3), seed, args);
    }
    run(
        kernels.dkv,
        case.grid_of_keys(),
        128,
        case.dynamic(4),
        seed,
        args![q, k, v, pk, pv, at, shape, d.head(), lse.head(), delta.head(), d_qkv.head(), parts.head()],
    );
    let before = rounded::<f32>(5, 2 * p * c);
    let sum = Device::<f32>::of(&before);
    let (row, first) = (2 * c as i64, [0, c as i64]);
    run(
        attention_sum_prefix_launch,
        [(2 * p * c).div_ceil(256), 1, 1],
        256,
        0,
        seed,
        args![parts.head(), sum.head(), sizes[0], p as i32, c as i32, row, first[0], first[1]],
    );

    let (out, lse, d_qkv) = (out.wide(), lse.wide(), d_qkv.wide());
    let mut expected_sum = before;
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        let (tokens, column) = (b * t * 3 * c..(b + 1) * t * 3 * c, h * width);
        let part = |index: usize| columns(&qkv[tokens.clone()], 3 * c, index * c + column, width);
        let [pk, pv] = [0, 1].map(|index| columns(&prompt, 2 * c, index * c + column, width));
        let (q, k, v) = (part(0), [pk, part(1)].concat(), [pv, part(2)].concat());
        let of_head = |data: &[f64]| columns(&data[b * t * c..][..t * c], c, column, width);
        let (starts, scale) = (&starts[b * t..][..t], f64::from(SCALE));
        let (expected, _) = reference::forward(&q, &k, &v, starts, scale, case.twin(t, 0));
        assert_close(&of_head(&out), &expected, tolerance::<T>(), "out");
        assert_close(&lse[(b * heads + h) * t..][..t], &sums(&q, &k, starts, case, t, 0), 1e-5, "lse");
        let (dq, dk, dv) = reference::backward(&of_head(&dout), &q, &k, &v, starts, scale, case.twin(t, 0));
        for (index, gradient) in [(0, &dq[..]), (1, &dk[p * width..]), (2, &dv[p * width..])] {
            let found = columns(&d_qkv[tokens.clone()], 3 * c, index * c + column, width);
            assert_close(&found, gradient, tolerance::<T>() * 4.0, ["dq", "dk", "dv"][index]);
        }
        for (index, gradient) in [(0, &dk), (1, &dv)] {
            for (at, gradient) in gradient[..p * width].iter().enumerate() {
                expected_sum[at / width * 2 * c + index * c + column + at % width] += gradient;
            }
        }
    }
    assert_close(&sum.wide(), &expected_sum, tolerance::<T>() * 8.0, "prefix gradient");
}

/// ln sum exp of the scores of one head.
fn sums(q: &[f64], k: &[f64], starts: &[u32], case: Case, queries: usize, past: usize) -> Vec<f64> {
    let width = case.width;
    let score = |i: usize, j: usize| -> f64 {
        (0..width).map(|e| q[i * width + e] * k[j * width + e]).sum::<f64>() * f64::from(SCALE)
    };
    let sees = |i: usize, j: usize| j < case.p || (starts[i] as usize..=past + i).contains(&(j - case.p));
    (0..queries)
        .map(|i| (0..k.len() / width).filter(|&j| sees(i, j)).map(|j| score(i, j).exp()).sum::<f64>().ln())
        .collect()
}

#[test]
fn plain_attention_matches_its_twin() {
    let packed = [0, 0, 0, 3, 3, 5, 5, 0, 1, 1, 1, 1, 5, 6];
    let long: Vec<u32> = (0..77).map(|i| if i < 40 { 0 } else { 40 }).collect();
    for seed in [1, 2] {
        let small = Case { batch: 2, t: 7, heads: 3, width: 5, p: 0, starts: &[0; 14], tensor: false, seed };
        check::<f32>(small);
        check::<f32>(Case { heads: 2, width: 8, p: 5, starts: &packed, ..small });
        // More than 48 KiB of shared memory in a block.
        check::<f32>(Case { heads: 1, width: 1056, p: 2, ..small });
        let large = Case { batch: 1, t: 77, heads: 1, width: 64, p: 37, starts: &long, tensor: false, seed };
        check::<f32>(large);
        check::<f16>(Case { width: 40, ..large });
        check::<bf16>(Case { width: 33, ..large });
    }
}

#[test]
fn tensor_core_attention_matches_its_twin() {
    let packed = [0, 0, 0, 3, 3, 5, 5, 0, 1, 1, 1, 1, 5, 6];
    let small = Case { batch: 2, t: 7, heads: 2, width: 64, p: 5, starts: &packed, tensor: true, seed: 1 };
    check::<f16>(small);
    check::<bf16>(small);
    check::<f16>(Case { p: 0, seed: 2, ..small });
    // Documents that end inside a tile, on its border, and one that hides a whole tile of keys.
    let long: Vec<u32> = (0..150)
        .map(|i| [0, 30, 64, 140][usize::from(i >= 30) + usize::from(i >= 64) + usize::from(i >= 140)])
        .collect();
    let large = Case { batch: 1, t: 150, heads: 1, width: 64, p: 70, starts: &long, tensor: true, seed: 3 };
    check::<f16>(large);
    check::<f16>(Case { starts: &[0; 150], p: 3, ..large });
    // The first query of a warp sees all of a tile but its last key.
    check::<f16>(Case { starts: &[0; 150], p: 14, ..large });
    check::<bf16>(Case { t: 65, starts: &long[..65], p: 0, ..large });
    // Warps of 32 queries that see none of a tile of keys: of a document before theirs, or of tokens after theirs; two
    // blocks of queries, the second with a single one.
    let apart: Vec<u32> = (0..129).map(|i| i / 32 * 32).collect();
    let wide = Case { t: 129, starts: &apart, ..large };
    check::<f16>(wide);
    check::<bf16>(Case { p: 0, seed: 4, ..wide });
    check::<f16>(Case { t: 128, starts: &[0; 128], p: 0, ..wide });
}

/// Queries after `past` keys in a cache with room for more; a single one also where the device alone knows how many they
/// are, and in which row of the cache.
fn cached<T: Activation>(case: Case, past: usize) {
    let counted: &[bool] = if case.t == past + 1 { &[false, true] } else { &[false] };
    counted.iter().for_each(|&counted| after::<T>(case, past, counted));
}

fn after<T: Activation>(case: Case, past: usize, counted: bool) {
    let Case { batch, t, heads, width, starts, tensor, seed, .. } = case;
    let kernels = if tensor { Kernels::tensor::<T>() } else { Kernels::plain::<T>() };
    let (c, queries, capacity) = (case.c(), t - past, t + 3);
    let (operands, qkv, prompt) = Operands::<T>::new(case);
    let caches = [(); 2].map(|()| Device::<T>::poisoned(batch * capacity * c));
    let sizes = [batch, c].map(|x| x as i32);
    // Where the device has the counts, it also has the rows' places in the cache: the last row comes first.
    let numbers = Device::<u32>::of(&vec![past as f64; batch]);
    let last_first = Device::<u32>::of(&(0..batch).rev().map(|row| row as f64).collect::<Vec<_>>());
    let none = std::ptr::null_mut();
    let (counts, slots) = if counted { (numbers.head(), last_first.head()) } else { (none, none) };
    // In two pieces, the second after the first.
    for (first, tokens) in [(0, past), (past, queries)] {
        let [k, v] = [1, 2].map(|index| {
            let all = operands.part(case, index);
            Heads { data: operands.qkv.at(index * c + first * 3 * c), ..all }
        });
        let [to_k, to_v] = caches.each_ref().map(|cache| cache.head());
        let before = if first > 0 { counts } else { none };
        let element = if before.is_null() { first * c } else { 0 };
        let place = (element as i64, (capacity * c) as i64);
        run(
            kernels.append,
            [(tokens * c).div_ceil(2048), batch, 2],
            256,
            0,
            seed,
            args![k, v, to_k, to_v, sizes[0], tokens as i32, sizes[1], place.0, place.1, before, slots],
        );
    }
    let q = Heads { data: operands.qkv.at(past * 3 * c), ..operands.part(case, 0) };
    let [k, v] =
        [0, 1].map(|at| Heads { data: caches[at].head(), row: c as i64, batch: (capacity * c) as i64 });
    let [pk, pv] = [0, 1].map(|index| operands.prompt(case, index));
    let own: Vec<u32> = starts.chunks(t).flat_map(|row| row[past..].to_vec()).collect();
    let own_starts = Device::<u32>::of(&own.iter().map(|&start| f64::from(start)).collect::<Vec<_>>());
    let (out, lse) =
        (Device::<T>::poisoned(batch * queries * c), Device::<f32>::poisoned(batch * heads * queries));
    let shape = case.shape(queries, if counted { past + 40 } else { past });
    if queries == 1 {
        // Shares of at most so many keys; more than there are where they are counted.
        let (splits, most) = if counted { (9, 32) } else { (3, 1) };
        let parts = Device::<f32>::poisoned(batch * heads * splits * (width + 2));
        run(
            kernels.decode,
            [splits, heads, batch],
            128,
            4 * (9 * width + 8),
            seed,
            args![q, k, v, pk, pv, own_starts.head(), shape, counts, slots, most, parts.head()],
        );
        run(
            kernels.finish,
            [heads, batch, 1],
            128,
            0,
            seed,
            args![parts.head(), splits as i32, shape, counts, most, out.head(), lse.head()],
        );
    } else {
        run(
            kernels.forward,
            case.grid(queries),
            128,
            case.dynamic(2),
            seed,
            args![q, k, v, pk, pv, own_starts.head(), shape, out.head(), lse.head()],
        );
    }
    let (out, lse) = (out.wide(), lse.wide());
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        let (tokens, column) = (&qkv[b * t * 3 * c..][..t * 3 * c], h * width);
        let part = |index: usize| columns(tokens, 3 * c, index * c + column, width);
        let [pk, pv] = [0, 1].map(|index| columns(&prompt, 2 * c, index * c + column, width));
        let (q, k, v) = (part(0), [pk, part(1)].concat(), [pv, part(2)].concat());
        let (q, starts) = (&q[past * width..], &own[b * queries..][..queries]);
        let (expected, _) = reference::forward(q, &k, &v, starts, f64::from(SCALE), case.twin(queries, past));
        let found = columns(&out[b * queries * c..][..queries * c], c, column, width);
        assert_close(&found, &expected, tolerance::<T>(), "out");
        let found = &lse[(b * heads + h) * queries..][..queries];
        assert_close(found, &sums(q, &k, starts, case, queries, past), 1e-5, "lse");
    }
}

#[test]
fn a_cache_gives_the_rows_of_its_twin() {
    let mut starts = [0; 142];
    starts[71 + 30..].fill(20);
    let case = Case { batch: 2, t: 71, heads: 2, width: 64, p: 5, starts: &starts, tensor: true, seed: 1 };
    cached::<f16>(case, 60);
    cached::<bf16>(case, 3);
    let plain = Case { tensor: false, width: 21, ..case };
    cached::<f32>(plain, 60);
    // One query: by the kernels that cut its keys into shares.
    cached::<f32>(plain, 70);
    cached::<f16>(Case { width: 64, ..plain }, 70);
    cached::<bf16>(Case { p: 0, ..plain }, 70);
    // More shares than visible keys.
    cached::<f32>(Case { batch: 1, t: 4, p: 0, starts: &[0, 0, 0, 2], ..plain }, 3);
}
