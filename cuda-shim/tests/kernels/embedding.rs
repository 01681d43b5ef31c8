//! Deltas of the embedding and virtual tokens, forward and backward, against the twin: ids that occur often, ids without
//! a row of wte.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::embed::{
    by_id,
    reference::{self, Delta, Embedding},
};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    embedding_add_f32_launch,
    embedding_add_f16_launch,
    embedding_add_bf16_launch,
    embedding_db_f32_launch,
    embedding_db_f16_launch,
    embedding_db_bf16_launch,
    embedding_d_xa_f32_launch,
    embedding_d_xa_f16_launch,
    embedding_d_xa_bf16_launch,
    embedding_xa_launch,
    embedding_da_launch,
    embed_f32_launch,
    embed_f16_launch,
    embed_bf16_launch,
    prompt_backward_f32_launch,
    prompt_backward_f16_launch,
    prompt_backward_bf16_launch,
);

const EMBED: [Launcher; 3] = [embed_f32_launch, embed_f16_launch, embed_bf16_launch];
const PROMPT: [Launcher; 3] =
    [prompt_backward_f32_launch, prompt_backward_f16_launch, prompt_backward_bf16_launch];

const ADD: [Launcher; 3] = [embedding_add_f32_launch, embedding_add_f16_launch, embedding_add_bf16_launch];
const DB: [Launcher; 3] = [embedding_db_f32_launch, embedding_db_f16_launch, embedding_db_bf16_launch];
const D_XA: [Launcher; 3] =
    [embedding_d_xa_f32_launch, embedding_d_xa_f16_launch, embedding_d_xa_bf16_launch];

const SCALE: f32 = 1.7;
const VOCAB: usize = 23;
/// Ids of the tests; those from VOCAB on have no column of A.
const IDS: usize = 26;

/// Ids `(n)`: one of them at every third place.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| if i % 3 == 1 { 4 } else { i * i % IDS as u32 }).collect()
}

fn check<T: Activation>(n: usize, c: usize, rank: usize, seed: u64) {
    let (add, db_kernel, d_xa_kernel) = (ADD[T::INDEX], DB[T::INDEX], D_XA[T::INDEX]);
    let (ids, order) = (ids(n), by_id(&ids(n)));
    let (x, dx) = (rounded::<T>(1, n * c), rounded::<T>(2, n * c));
    let (a, b) = (rounded::<f32>(3, rank * VOCAB), rounded::<f32>(4, c * rank));
    let (da, db) = (rounded::<f32>(5, rank * VOCAB), rounded::<f32>(6, c * rank));
    // The twin has a row and a column of zeros for every id, and x as positions.
    let mut wide_a = vec![0.0; rank * IDS];
    for r in 0..rank {
        wide_a[r * IDS..][..VOCAB].copy_from_slice(&a[r * VOCAB..][..VOCAB]);
    }
    let places: Vec<u32> = (0..n as u32).collect();
    let twin = Embedding {
        ids: &ids,
        positions: &places,
        wte: &vec![0.0; IDS * c],
        wpe: &x,
        width: c,
        prompt: &[],
        deltas: vec![Delta { a: &wide_a, b: &b, rank, scale: f64::from(SCALE) }],
    };
    let gradient = reference::backward(&twin, &dx).deltas.remove(0);

    let (ids_in, order_in) = (Device::<u32>::new(&ids), Device::<u32>::new(&order));
    let (a_in, b_in, x_out) = (Device::<f32>::of(&a), Device::<f32>::of(&b), Device::<T>::of(&x));
    let [n_, c_, vocab_, rank_] = [n, c, VOCAB, rank].map(|size| size as i32);
    let args = args![ids_in.head(), a_in.head(), b_in.head(), SCALE, x_out.head(), n_, c_, vocab_, rank_];
    run(add, [n.div_ceil(8), c.div_ceil(128), 1], 128, 0, seed, args);
    assert_close(&x_out.wide(), &reference::forward(&twin), T::ROUNDING + 2e-6, "x");

    let (dx_in, xa) = (Device::<T>::of(&dx), Device::<f32>::poisoned(n * rank));
    let args = args![ids_in.head(), a_in.head(), xa.head(), n_, vocab_, rank_];
    run(embedding_xa_launch, [(n * rank).div_ceil(256), 1, 1], 256, 0, seed, args);
    let expected: Vec<f64> =
        (0..n * rank).map(|at| wide_a[at % rank * IDS + ids[at / rank] as usize]).collect();
    assert_eq!(xa.wide(), expected);
    let db_out = Device::<f32>::of(&db);
    let args = args![dx_in.head(), xa.head(), SCALE, db_out.head(), n_, c_, rank_];
    run(db_kernel, [c.div_ceil(32), rank.div_ceil(8), 1], 256, 0, seed, args);
    let expected: Vec<f64> = db.iter().zip(&gradient.b).map(|(before, d)| before + d).collect();
    assert_close(&db_out.wide(), &expected, 1e-5, "dB");

    let (d_xa, da_out) = (Device::<f32>::poisoned(n * rank), Device::<f32>::of(&da));
    let args = args![dx_in.head(), b_in.head(), SCALE, d_xa.head(), n_, c_, rank_];
    run(d_xa_kernel, [n.div_ceil(8), 1, 1], 256, 0, seed, args);
    let args = args![ids_in.head(), order_in.head(), d_xa.head(), da_out.head(), n_, vocab_, rank_];
    run(embedding_da_launch, [n.div_ceil(8), 1, 1], 256, 0, seed, args);
    let expected: Vec<f64> =
        (0..rank * VOCAB).map(|at| da[at] + gradient.a[at / VOCAB * IDS + at % VOCAB]).collect();
    assert_close(&da_out.wide(), &expected, 1e-5, "dA");
}

#[test]
fn deltas_of_the_embedding_match_their_twin() {
    for (n, c, rank) in [(1, 5, 3), (7, 131, 1), (64, 264, 8), (203, 37, 35)] {
        for seed in SEEDS {
            check::<f32>(n, c, rank, seed);
            check::<f16>(n, c, rank, seed);
            check::<bf16>(n, c, rank, seed);
        }
    }
}

/// Rows of a prompt, and the sum of what comes back to them, beside rows of the table.
fn check_prompt<T: Activation>(n: usize, c: usize, seed: u64) {
    let (ids, length) = (ids(n), IDS - VOCAB);
    let positions: Vec<u32> = (0..n as u32).map(|i| i % 9).collect();
    let (wte, wpe) = (rounded::<T::Weight>(1, VOCAB * c), rounded::<f16>(2, 9 * c));
    let (prompt, before) = (rounded::<f32>(3, length * c), rounded::<f32>(4, length * c));
    let dx = rounded::<T>(5, n * c);
    let twin = Embedding {
        ids: &ids,
        positions: &positions,
        wte: &wte,
        wpe: &wpe,
        width: c,
        prompt: &prompt,
        deltas: Vec::new(),
    };
    let (ids_in, positions_in) = (Device::<u32>::new(&ids), Device::<u32>::new(&positions));
    let (wte_in, wpe_in) = (Device::<T::Weight>::of(&wte), Device::<f16>::of(&wpe));
    let (prompt_in, x) = (Device::<f32>::of(&prompt), Device::<T>::poisoned(n * c));
    let [n_, c_, vocab] = [n, c, VOCAB].map(|size| size as i32);
    let tables = (wte_in.head(), wpe_in.head(), prompt_in.head());
    let args = args![ids_in.head(), positions_in.head(), tables.0, tables.1, tables.2, x.head(), vocab, c_];
    run(EMBED[T::INDEX], [n, 1, 1], 128, 0, seed, args);
    assert_close(&x.wide(), &reference::forward(&twin), T::ROUNDING, "x");

    let (order, dx_in) = (Device::<u32>::new(&by_id(&ids)), Device::<T>::of(&dx));
    let d_prompt = Device::<f32>::of(&before);
    let args = args![ids_in.head(), order.head(), dx_in.head(), d_prompt.head(), n_, c_, vocab];
    run(PROMPT[T::INDEX], [n, 1, 1], 128, 0, seed, args);
    let gradient = reference::backward(&twin, &dx).prompt;
    let expected: Vec<f64> = before.iter().zip(gradient).map(|(before, d)| before + d).collect();
    assert_close(&d_prompt.wide(), &expected, 2e-6, "d prompt");
}

#[test]
fn virtual_tokens_match_their_twin() {
    for (n, c) in [(1, 5), (7, 131), (203, 1043)] {
        for seed in SEEDS {
            check_prompt::<f32>(n, c, seed);
            check_prompt::<f16>(n, c, seed);
            check_prompt::<bf16>(n, c, seed);
        }
    }
}
