//! Central differences of the REFERENCE twin, then the CPU side against it: ids that occur often, some without a delta.

use half::f16;

use super::{
    reference::{Delta as Twin, Embedding},
    *,
};
use crate::{kernels::q8, testing::*};

#[test]
fn adds_the_rows_of_both_tables() {
    let (wte, wpe) = (f16_numbers(1, 7 * 3), f16_numbers(2, 5 * 3));
    let (ids, positions) = ([6u32, 0, 2], [0u32, 4, 4]);
    let mut x = [0f32; 9];
    let tables = Tables { wte: Matrix::f16(wte[..].into(), 7, 3), wpe: wpe[..].into(), prompt: None };
    forward(ids[..].into(), positions[..].into(), tables, x[..].as_mut().into());
    for row in 0..3 {
        for i in 0..3 {
            let expected =
                wte[ids[row] as usize * 3 + i].to_f32() + wpe[positions[row] as usize * 3 + i].to_f32();
            assert_eq!(x[row * 3 + i], expected);
        }
    }
}

#[test]
fn an_8_bit_table_gives_its_values() {
    let c = q8::BLOCK + 3;
    let codes: Vec<i8> = (0..2 * c).map(|i| (i * 53 % 255) as u8 as i8).collect();
    let scales = [0.5, 3.0, 0.125, 1.0].map(f16::from_f32);
    let wpe = f16_numbers(2, c);
    let mut x = vec![0f32; c];
    let wte = Matrix::codes(codes[..].into(), scales[..].into(), 2, c);
    let tables = Tables { wte, wpe: wpe[..].into(), prompt: None };
    forward([1u32][..].into(), [0u32][..].into(), tables, x[..].as_mut().into());
    for i in 0..c {
        let token = f32::from(codes[c + i]) * scales[2 + i / q8::BLOCK].to_f32();
        assert_eq!(x[i], token + wpe[i].to_f32());
    }
}

#[test]
fn tokens_of_one_id_stand_side_by_side() {
    assert_eq!(by_id(&[5, 2, 5, 9, 2, 5]), [1, 4, 0, 2, 5, 3]);
    assert!(by_id(&[]).is_empty());
}

/// 9 tokens of 6 ids, two of them virtual, width 5, ranks 3 and 2; one delta is subtracted.
struct Case {
    tables: [Vec<f64>; 2],
    /// Both deltas, and the prompt.
    learned: [Vec<f64>; 5],
}

impl Case {
    fn new() -> Self {
        Self {
            tables: [doubles(1, 6 * 5), doubles(2, 4 * 5)],
            learned: [
                doubles(3, 3 * 6),
                doubles(4, 5 * 3),
                doubles(5, 2 * 6),
                doubles(6, 5 * 2),
                doubles(8, 2 * 5),
            ],
        }
    }

    fn embedding(&self) -> Embedding<'_, f64> {
        let [a, b, c, d, prompt] = &self.learned;
        let first = Twin { a, b, rank: 3, scale: 1.7 };
        let second = Twin { a: c, b: d, rank: 2, scale: -0.6 };
        Embedding {
            ids: &[6, 7, 3, 0, 3, 5, 6, 3, 1],
            positions: &[0, 1, 2, 3, 1, 0, 1, 2, 3],
            wte: &self.tables[0],
            wpe: &self.tables[1],
            width: 5,
            prompt,
            deltas: vec![first, second],
        }
    }
}

#[test]
fn reference_backward_is_central_differences() {
    let (dx, case) = (doubles(7, 9 * 5), Case::new());
    let found = reference::backward(&case.embedding(), &dx);
    let [first, second] = &found.deltas[..] else { panic!("two deltas") };
    let gradients = [&first.a, &first.b, &second.a, &second.b, &found.prompt];
    for (index, gradient) in gradients.into_iter().enumerate() {
        assert_gradient(&case.learned[index], gradient, &format!("learned {index}"), |point| {
            let mut case = Case::new();
            case.learned[index] = point.to_vec();
            weighted(&reference::forward(&case.embedding()), &dx)
        });
    }
}

const VOCAB: usize = 23;

/// x and all gradients of a delta on n tokens of width c; every fourth id or so has no row of wte.
fn run(n: usize, c: usize, delta: &EmbeddingDelta, len: usize) -> [Vec<f32>; 2] {
    let (values, ids) = (numbers(1, len), ids(n));
    let (mut x, dx, mut grads) = (numbers(2, n * c), numbers(3, n * c), numbers(4, len));
    let mut d_xa = vec![f32::NAN; n * delta.rank];
    let (tokens, values) = (Tokens { ids: ids[..].into(), vocab: VOCAB }, View::from(&values[..]));
    add_delta(delta, tokens, values, x[..].as_mut().into());
    let to = DeltaGradients { grads: grads[..].as_mut().into(), d_xa: d_xa[..].as_mut().into() };
    delta_backward(delta, tokens, by_id(&ids)[..].into(), values, dx[..].into(), to);
    [x, grads]
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i + 3 * i) % 31).collect()
}

fn delta(c: usize, rank: usize, frozen: (bool, bool)) -> (EmbeddingDelta, usize) {
    let b = 5 + rank * VOCAB + 2;
    let (a, b_) = (Vector { at: 5, frozen: frozen.0 }, Vector { at: b, frozen: frozen.1 });
    (EmbeddingDelta { a, b: b_, rank, scale: 1.7 }, b + c * rank + 3)
}

#[test]
fn cpu_matches_its_twin() {
    for (n, c, rank) in [(1, 5, 3), (7, 37, 1), (64, 300, 8), (131, 261, 5)] {
        for frozen in [(false, false), (true, false), (false, true), (true, true)] {
            let (delta, len) = delta(c, rank, frozen);
            let [x, grads] = run(n, c, &delta, len);
            let (values, ids) = (widened(&numbers(1, len)), ids(n));
            let (dx, before) = (widened(&numbers(3, n * c)), widened(&numbers(4, len)));
            // The twin has a row of zeros for every id, and what is there before as positions.
            let mut a = vec![0.0; rank * 31];
            for r in 0..rank {
                a[r * 31..][..VOCAB].copy_from_slice(&values[5 + r * VOCAB..][..VOCAB]);
            }
            let (start, places) = (widened(&numbers(2, n * c)), (0..n as u32).collect::<Vec<_>>());
            let b = &values[delta.b.at..][..c * rank];
            let twin = Embedding {
                ids: &ids,
                positions: &places,
                wte: &vec![0.0; 31 * c],
                wpe: &start,
                width: c,
                prompt: &[],
                deltas: vec![Twin { a: &a, b, rank, scale: f64::from(1.7f32) }],
            };
            assert_close(&x, &reference::forward(&twin), 3e-6, "x");
            let gradient = reference::backward(&twin, &dx).deltas.remove(0);
            let mut expected = before;
            for r in 0..rank * usize::from(!frozen.0) {
                let to = expected[5 + r * VOCAB..][..VOCAB].iter_mut();
                to.zip(&gradient.a[r * 31..]).for_each(|(to, d)| *to += d);
            }
            if !frozen.1 {
                let to = expected[delta.b.at..][..c * rank].iter_mut();
                to.zip(&gradient.b).for_each(|(to, d)| *to += d);
            }
            assert_close(&grads, &expected, 2e-5, "gradients");
        }
    }
}

/// x and the gradient of a prompt of 8 rows; an id of the table stands between virtual ones.
fn run_prompt(n: usize, c: usize) -> ([Vec<f32>; 2], Vec<u32>) {
    let ids: Vec<u32> = (0..n as u32).map(|i| (i * i + 3 * i) % 31).collect();
    let (wte, wpe, prompt) = (f16_numbers(1, VOCAB * c), f16_numbers(2, 9 * c), numbers(3, 8 * c));
    let (mut x, dx, mut d_prompt) = (vec![f32::NAN; n * c], numbers(4, n * c), numbers(5, 8 * c));
    let positions: Vec<u32> = (0..n as u32).map(|i| i % 9).collect();
    let wte = Matrix::f16(wte[..].into(), VOCAB, c);
    let tables = Tables { wte, wpe: wpe[..].into(), prompt: Some(prompt[..].into()) };
    forward(ids[..].into(), positions[..].into(), tables, x[..].as_mut().into());
    let tokens = Tokens { ids: ids[..].into(), vocab: VOCAB };
    prompt_backward(tokens, by_id(&ids)[..].into(), dx[..].into(), d_prompt[..].as_mut().into());
    ([x, d_prompt], ids)
}

#[test]
fn rows_of_a_prompt_are_those_of_the_ids_after_the_table() {
    for (n, c) in [(7, 5), (131, 37)] {
        let ([x, d_prompt], ids) = run_prompt(n, c);
        let wide = |halves: Vec<f16>| halves.into_iter().map(f16::to_f64).collect::<Vec<_>>();
        let (wte, wpe) = (wide(f16_numbers(1, VOCAB * c)), wide(f16_numbers(2, 9 * c)));
        let positions: Vec<u32> = (0..n as u32).map(|i| i % 9).collect();
        let prompt = widened(&numbers(3, 8 * c));
        let (ids, positions) = (&ids[..], &positions[..]);
        let twin =
            Embedding { ids, positions, wte: &wte, wpe: &wpe, width: c, prompt: &prompt, deltas: vec![] };
        assert_close(&x, &reference::forward(&twin), 1e-7, "x");
        let gradient = reference::backward(&twin, &widened(&numbers(4, n * c))).prompt;
        let before = widened(&numbers(5, 8 * c));
        let expected: Vec<f64> = before.iter().zip(gradient).map(|(before, d)| before + d).collect();
        assert_close(&d_prompt, &expected, 1e-6, "d prompt");
    }
}

#[test]
fn threads_change_no_bit() {
    let one = with_threads(1, || run_prompt(131, 37).0);
    assert!([2, 3, 16].iter().all(|&threads| with_threads(threads, || run_prompt(131, 37).0) == one));
    for (n, c, rank) in [(7, 64, 3), (300, 320, 8)] {
        let (delta, len) = delta(c, rank, (false, false));
        let one = with_threads(1, || run(n, c, &delta, len));
        for threads in [2, 3, 16] {
            assert_eq!(with_threads(threads, || run(n, c, &delta, len)), one, "{threads} threads");
        }
    }
}
