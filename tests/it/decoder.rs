//! Generation with a cache gives the logits of a full pass, for any way to feed, cut or rewind a text.

use std::{ops::Range, sync::Arc};

use engraft::{
    data::{NO_LOSS, Row},
    device::{Buffer, DType, arena::Arenas, cpu::vectors, page_cache::large_pages},
    kernels::matmul::Layout,
    model::{AdapterBindings, Base, Decoder, Limits, Policy, PrefixState, Stack, Trained},
};
use engraft_util::rng;

use crate::setup::{
    self, Case, RandomBase, Sizes, batch, bindings, bits, cases, difference, golden, random_base, row, wide,
    within,
};

/// Bounds of docs/NUMERICS.md: logits relative to the largest, a loss relative to itself. Rows of
/// products are summed in an order that depends on how many of them there are.
const LOGITS: f64 = 5e-6;
const LOSS: f64 = 2e-6;

const LONG: Sizes = Sizes { layers: 2, heads: 3, width: 24, inner: 50, positions: 640, vocab: 61 };

fn long() -> RandomBase {
    random_base(LONG, "gelu_new")
}

fn decoder(base: &Arc<Base>, case: &Case, capacity: usize) -> Decoder {
    setup::decoder(base, case, 1, capacity)
}

/// Logits after `ids`, read at once.
fn at_once(base: &Arc<Base>, case: &Case, ids: &[u32]) -> Vec<f32> {
    decoder(base, case, ids.len()).feed(ids).unwrap().to_vec()
}

#[test]
fn however_a_text_is_fed_its_logits_are_the_same() {
    let random = long();
    let base = &random.base;
    let ids = row(1, 601, 0, LONG.vocab).ids;
    let mut worst = 0f64;
    for case in cases(base, 0.0) {
        let whole = wide(&at_once(base, &case, &ids));
        for size in [1, 2, 7, 255, 256, 257, 300] {
            let mut decoder = decoder(base, &case, ids.len());
            for chunk in ids.chunks(size) {
                decoder.feed(chunk).unwrap();
            }
            assert_eq!(decoder.position(), ids.len());
            assert!(decoder.feed(&[1]).is_err(), "no room is left");
            let mut again = decoder;
            again.rewind(600);
            worst = worst.max(difference(again.feed(&ids[600..]).unwrap(), &whole));
        }
    }
    within(worst, LOGITS, "601 tokens in chunks of 1 to 300");
}

/// Training's forward has no cache and no chunks: it is the full recompute.
fn stack_losses(base: &Arc<Base>, case: &Case, ids: &[u32], places: Range<usize>) -> f64 {
    let target = |index: usize| if places.contains(&index) { ids[index + 1] as i32 } else { NO_LOSS };
    let targets = (0..ids.len()).map(target).collect();
    let row = Row { ids: ids.to_vec(), targets, starts: vec![0; ids.len()] };
    let limits = Limits { rows: 1, tokens: ids.len() };
    let bindings = bindings(base, case);
    let mut arenas = Arenas::real(None);
    let mut prefix = PrefixState::new(&bindings, &base.config, DType::F32, false, &mut arenas).unwrap();
    let mut stack =
        Stack::new(Arc::clone(base), bindings, limits, Policy::default(), false, &mut arenas).unwrap();
    let store = Buffer::from_slice(&case.values).unwrap();
    if let Some(prefix) = &mut prefix {
        prefix.refresh(store.view());
    }
    let prefix = prefix.as_ref().map(|prefix| prefix.view(store.view()));
    stack.loss(Trained { values: store.view(), prefix }, &batch(&[row])).unwrap().sum
}

#[test]
fn the_cache_gives_the_losses_of_the_full_pass() {
    let random = long();
    let base = &random.base;
    let ids = row(2, 530, 0, LONG.vocab).ids;
    let mut worst = 0f64;
    for case in cases(base, 0.0) {
        let mut decoder = decoder(base, &case, ids.len());
        let losses: Vec<f64> = (0..ids.len() - 1)
            .map(|index| {
                let z = wide(decoder.feed(&ids[index..=index]).unwrap());
                z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[ids[index + 1] as usize]
            })
            .collect();
        // Single places show a shift of one that a sum would hide.
        for places in [0..529, 0..1, 63..64, 64..65, 255..256, 256..257, 257..258, 528..529] {
            let expected = stack_losses(base, &case, &ids, places.clone());
            let found: f64 = losses[places].iter().sum();
            worst = worst.max((found / expected - 1.0).abs());
        }
    }
    within(worst, LOSS, "losses token by token");
}

#[test]
fn a_rewound_decoder_repeats_itself() {
    let random = long();
    let base = &random.base;
    let ids = row(3, 400, 0, LONG.vocab).ids;
    let other = row(4, 100, 0, LONG.vocab).ids;
    for case in cases(base, 0.0) {
        let mut decoder = decoder(base, &case, 600);
        let first = decoder.feed(&ids).unwrap().to_vec();
        let next = decoder.feed(&[7]).unwrap().to_vec();
        decoder.feed(&other).unwrap();
        decoder.rewind(ids.len());
        assert_eq!(decoder.position(), ids.len());
        assert_eq!(bits(decoder.feed(&[7]).unwrap()), bits(&next), "{}", case.name);
        // Rewinding never moves forwards.
        decoder.rewind(1000);
        assert_eq!(decoder.position(), ids.len() + 1);
        decoder.rewind(0);
        assert_eq!(bits(decoder.feed(&ids).unwrap()), bits(&first), "{}", case.name);
    }
}

/// Random feeding and rewinding, against the text that should then have been read.
#[test]
fn any_walk_ends_where_the_text_says() {
    let base = golden("tiny");
    let capacity = base.config.positions - 5;
    let mut worst = 0f64;
    for case in cases(&base, 0.0) {
        for seed in 0..40 {
            let key = rng::key(&[seed, rng::name("walk")]);
            let mut draws = 0..;
            let mut below = |most: usize| {
                let index = draws.next().unwrap_or(0);
                (rng::uniform(key, index) * most as f32) as usize % most
            };
            let mut decoder = decoder(&base, &case, capacity);
            let mut text: Vec<u32> = Vec::new();
            let mut logits = Vec::new();
            for _ in 0..12 {
                if text.len() == capacity || below(3) == 0 {
                    text.truncate(below(text.len().max(1)));
                    decoder.rewind(text.len());
                }
                let ids: Vec<u32> =
                    (0..1 + below(capacity - text.len())).map(|_| below(base.config.vocab) as u32).collect();
                text.extend(&ids);
                logits = decoder.feed(&ids).unwrap().to_vec();
                assert_eq!(decoder.position(), text.len());
            }
            worst = worst.max(difference(&logits, &wide(&at_once(&base, &case, &text))));
        }
    }
    within(worst, LOGITS, "random walks");
}

#[test]
fn what_cannot_be_read_changes_nothing() {
    let base = golden("tiny");
    let vocab = base.config.vocab as u32;
    for case in cases(&base, 0.0) {
        let (mut decoder, mut calm) = (decoder(&base, &case, 10), decoder(&base, &case, 10));
        decoder.feed(&[1, 2, 3]).unwrap();
        calm.feed(&[1, 2, 3]).unwrap();
        for (ids, says) in [
            (vec![], "0 tokens do not fit where 1 to 7 do"),
            (vec![1; 8], "8 tokens do not fit where 1 to 7 do"),
            (vec![4, vocab], "token 61 is outside the vocabulary of 61"),
            (vec![u32::MAX], "outside the vocabulary"),
        ] {
            let error = decoder.feed(&ids).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(decoder.position(), 3);
        }
        assert_eq!(bits(decoder.feed(&[4; 7]).unwrap()), bits(calm.feed(&[4; 7]).unwrap()));
    }
    let case = &cases(&base, 0.0)[2];
    let too_long = Decoder::new(Arc::clone(&base), bindings(&base, case), case.values.clone(), 1, 36);
    let error = too_long.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("36 tokens after a prefix of 5"), "{error}");
}

/// Adapters matter to generation at all, each of them.
#[test]
fn adapters_change_the_logits() {
    let base = golden("tiny");
    let ids = row(5, 20, 0, base.config.vocab).ids;
    let none = AdapterBindings::none(base.config.layers);
    let bare = Decoder::new(Arc::clone(&base), none, Vec::new(), 1, 20).unwrap().feed(&ids).unwrap().to_vec();
    for case in cases(&base, 0.0) {
        assert!(difference(&at_once(&base, &case, &ids), &wide(&bare)) > 1e-2, "{}", case.name);
    }
}

/// Sequences forked from one prompt and read side by side give what each gives alone.
#[test]
fn forked_sequences_do_not_see_each_other() {
    let base = golden("tiny");
    for case in cases(&base, 0.0) {
        let prompt = [3u32, 1, 4, 1, 5];
        let ends = [[9u32, 2, 6], [5, 3, 5], [8, 9, 7]];
        let mut side_by_side =
            Decoder::new(Arc::clone(&base), bindings(&base, &case), case.values.clone(), 3, 12).unwrap();
        side_by_side.feed(&prompt).unwrap();
        side_by_side.fork(3);
        let vocab = base.config.vocab;
        for step in 0..3 {
            let ids: Vec<u32> = ends.iter().map(|end| end[step]).collect();
            let logits = side_by_side.feed_each(&ids).unwrap().to_vec();
            for (row, end) in ends.iter().enumerate() {
                let alone = [&prompt[..], &end[..=step]].concat();
                let expected = wide(&at_once(&base, &case, &alone));
                let difference = difference(&logits[row * vocab..][..vocab], &expected);
                assert!(difference < LOGITS, "{} row {row} step {step}: {difference:.1e}", case.name);
            }
        }
        // After a rewind the first sequence goes on alone.
        side_by_side.rewind(prompt.len());
        let again = side_by_side.feed(&[9]).unwrap().to_vec();
        let expected = wide(&at_once(&base, &case, &[3, 1, 4, 1, 5, 9]));
        assert!(difference(&again, &expected) < LOGITS, "{}", case.name);
    }
}

/// Blocks laid out for generation give the same bits as those of the file, in products of every number of rows.
#[test]
fn a_base_laid_out_for_many_samples_says_the_same() {
    let random = random_base(Sizes { heads: 2, width: 32, inner: 96, ..LONG }, "gelu_new");
    let base = &random.base;
    assert!(Arc::ptr_eq(base, &base.for_generation(1, 30)), "few tokens are not worth a copy");
    assert!(!Arc::ptr_eq(base, &base.for_generation(1, 300)), "many tokens of one sample are worth a copy");
    let laid_out = base.for_generation(30, 100);
    let ids = row(2, 130, 0, LONG.vocab).ids;
    for case in cases(base, 0.0) {
        let of = |base: &Arc<Base>| {
            let (bindings, values) = (bindings(base, &case), case.values.clone());
            let mut decoder = Decoder::new(Arc::clone(base), bindings, values, 30, ids.len() + 2).unwrap();
            let mut logits = decoder.feed(&ids).unwrap().to_vec();
            for (count, id) in [(1, 7), (30, 3)] {
                decoder.rewind(ids.len());
                decoder.fork(count);
                logits.extend(decoder.feed_each(&vec![id; count]).unwrap());
            }
            bits(&logits)
        };
        assert!(of(base) == of(&laid_out), "{}", case.name);
    }
    let layout = |base: &Base| base.weights.blocks[1].mlp_proj.weight.layout;
    assert_eq!(layout(base), Layout::Rows);
    assert_eq!(laid_out.weights.head_transposed.is_some(), vectors());
    let strips = large_pages() && vectors();
    assert_eq!(layout(&laid_out), if strips { Layout::Strips } else { Layout::Rows });
}
