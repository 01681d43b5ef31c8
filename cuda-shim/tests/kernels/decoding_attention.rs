//! The launch of a decoder's layer that joins queries, keys and values, appends to the cache and attends.

use engraft::kernels::attention::reference::{self as attention, Shape as Head};
use half::{bf16, f16};

use crate::{
    args,
    attention::{Heads, Shape},
    decoding::{BF16, F16, F32, Kernels, Left, Lows, launch},
    harness::*,
};

#[repr(C)]
#[derive(Clone, Copy)]
struct Cache<T> {
    k: *mut T,
    v: *mut T,
    row: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    counts: *const u32,
    slots: *const u32,
    first: i32,
    n: i32,
}

#[derive(Clone, Copy)]
struct Attention {
    n: usize,
    heads: usize,
    width: usize,
    prefix: usize,
    /// Tokens in the cache of each row.
    counts: [u32; 3],
    /// Rows of a group before it.
    first: usize,
    /// Blocks of a head, each for at most so many keys.
    grid: (usize, usize),
}

/// Attention of the rows from `first` on, whose queries, keys and values were left in shares.
fn attended<T: Activation>(kernels: Kernels, case: Attention, seed: u64) {
    let Attention { n, heads, width, prefix, counts, first, grid: (splits, most) } = case;
    let (c, capacity, rows) = (heads * width, 160, n - first);
    let (inputs, slots) = (24, [2u32, 0, 1]);
    let (deltas, x) = (Lows::new(50, n, inputs, 3 * c, true), numbers(9, n * inputs));
    let left = Left::new(60, &x, &deltas, n, 3 * c);
    let cells = 3 * capacity * c;
    let (keys, values) = (rounded::<T>(11, cells), rounded::<T>(12, cells));
    let prompt = rounded::<T>(13, prefix.max(1) * 2 * c);
    // What is not yet read is not there yet.
    let cut = |all: &[f64]| -> Vec<f64> {
        let mut all = all.to_vec();
        for (row, slot) in slots[..rows].iter().enumerate() {
            all[*slot as usize * capacity * c..][counts[row] as usize * c..capacity * c].fill(f64::NAN);
        }
        all
    };
    let (k, v) = (Device::<T>::of(&cut(&keys)), Device::<T>::of(&cut(&values)));
    let p = Device::<T>::of(&prompt);
    let of = |at: usize| Heads { data: p.at(at * c), row: 2 * c as i64, batch: 0 };
    let (count, slot) = (Device::<u32>::new(&counts[..rows]), Device::<u32>::new(&slots[..rows]));
    let shape = Shape {
        batch: n as i32,
        queries: 1,
        past: capacity as i32 - 1,
        heads: heads as i32,
        width: width as i32,
        prefix: prefix as i32,
        scale: 0.3,
    };
    let parts = Device::<f32>::poisoned(n * heads * splits * (width + 2));
    let tickets = Device::<u32>::new(&vec![0; n * heads]);
    let out = Device::<T>::poisoned(n * c);
    let cache = Cache { k: k.head(), v: v.head(), row: (capacity * c) as i64 };
    let at = Rows { counts: count.head(), slots: slot.head(), first: first as i32, n: n as i32 };
    launch(
        kernels[1][0],
        [splits, heads, rows],
        (128, 5 * width + 8 + deltas.ranks(), seed),
        args![
            left.open(),
            cache,
            of(0),
            of(1),
            shape,
            at,
            most as i32,
            parts.head(),
            tickets.head(),
            out.head()
        ],
        &[&deltas],
    );
    assert!(tickets.get().iter().all(|ticket| *ticket == 0), "a ticket is left");
    let (out, new_k, new_v) = (out.wide(), k.wide(), v.wide());
    for row in 0..rows {
        let (past, cell) = (counts[row] as usize, slots[row] as usize * capacity * c);
        let own =
            |column: usize| T::of(left.value(&x, &deltas, n, 3 * c, (first + row) * 3 * c + column)).wide();
        for h in 0..heads {
            let vector =
                |at: usize| -> Vec<f64> { (0..width).map(|e| own(at * c + h * width + e)).collect() };
            let all = |which: usize, cache: &[f64]| -> Vec<f64> {
                let before =
                    (0..prefix).flat_map(|i| prompt[(2 * i + which) * c + h * width..][..width].to_vec());
                let read = (0..past).flat_map(|i| cache[cell + i * c + h * width..][..width].to_vec());
                before.chain(read).chain(vector(1 + which)).collect()
            };
            let twin = Head { queries: 1, past, width, prefix };
            let (expected, _) = attention::forward(
                &vector(0),
                &all(0, &keys),
                &all(1, &values),
                &[0],
                f64::from(0.3f32),
                twin,
            );
            let found = &out[(first + row) * c + h * width..][..width];
            assert_close(found, &expected, 4.0 * T::ROUNDING + 2e-5, "attention");
            for (cache, which) in [(&new_k, 1), (&new_v, 2)] {
                let found = &cache[cell + past * c + h * width..][..width];
                assert_close(found, &vector(which), T::ROUNDING + 1e-6, "what is appended");
            }
        }
        // Nothing beyond the new token is written.
        let rest = &new_k[cell + (past + 1) * c..cell + capacity * c];
        assert!(rest.iter().all(|x| x.is_nan()), "a token is written that does not exist");
    }
    assert!(first == 0 || out[..first * c].iter().all(|x| x.is_nan()), "a row of another group is written");
}

#[test]
fn attention_joins_its_operands_and_appends_them() {
    let case =
        Attention { n: 3, heads: 2, width: 64, prefix: 5, counts: [70, 0, 131], first: 0, grid: (6, 32) };
    for seed in [1, 2] {
        attended::<f16>(F16, case, seed);
        attended::<bf16>(BF16, Attention { prefix: 0, ..case }, seed);
        attended::<f32>(F32, Attention { width: 20, ..case }, seed);
        // One share; more shares than keys; rows after another group.
        attended::<f32>(F32, Attention { width: 24, grid: (1, 200), ..case }, seed);
        attended::<f16>(F16, Attention { counts: [1, 0, 3], prefix: 0, grid: (9, 1), ..case }, seed);
        attended::<f16>(F16, Attention { first: 1, counts: [40, 3, 0], ..case }, seed);
    }
}
