//! Rows of a decoder that are read together, of any lengths and adapters, have the logits of each row alone.

use std::sync::Arc;

use engraft::model::{AdapterBindings, Base, Decoder, RowTokens};
use engraft_adapters::LoraSpec;

use crate::setup::{
    Case, RandomBase, Sizes, bindings, bits, case, difference, lora, prefix, random_base, row, wide, within,
};

/// The bound of docs/NUMERICS.md: rows of products are summed in an order that depends on how many of them there are.
const LOGITS: f64 = 5e-6;

const SIZES: Sizes = Sizes { layers: 3, heads: 3, width: 24, inner: 50, positions: 640, vocab: 61 };

fn base() -> RandomBase {
    random_base(SIZES, "gelu_new")
}

/// Adapters of different ranks, sites and lengths of prefix.
fn adapters(base: &Base) -> Vec<Case> {
    let rank = |rank| Some(LoraSpec { rank, ..lora("q,v,mlp.c_proj", 0.0) });
    vec![
        case("lora", base, Some(lora("all-linear", 0.0)), None),
        case("another lora", base, rank(7), None),
        case("prefix", base, None, Some(prefix(5, None))),
        case("lora and a shorter prefix", base, rank(2), Some(prefix(2, None))),
        case("projected prefix", base, None, Some(prefix(3, Some(13)))),
    ]
}

/// A decoder of the bare base with all adapters, numbered from 1.
fn together(base: &Arc<Base>, cases: &[Case], rows: usize, capacity: usize) -> Decoder {
    let none = AdapterBindings::none(base.config.layers);
    let mut decoder = Decoder::new(Arc::clone(base), none, Vec::new(), rows, capacity).unwrap();
    for (number, case) in (1..).zip(cases) {
        let added = decoder.add_adapter(bindings(base, case), case.values.clone()).unwrap();
        assert_eq!(added, number);
    }
    decoder
}

/// Logits after `ids` with an adapter, by a decoder of its own.
fn alone(base: &Arc<Base>, cases: &[Case], adapter: usize, ids: &[u32]) -> Vec<f64> {
    let (bindings, values) = match adapter.checked_sub(1) {
        None => (AdapterBindings::none(base.config.layers), Vec::new()),
        Some(index) => (bindings(base, &cases[index]), cases[index].values.clone()),
    };
    let mut decoder = Decoder::new(Arc::clone(base), bindings, values, 1, ids.len()).unwrap();
    wide(decoder.feed(ids).unwrap())
}

/// A row of the tests: its text, and the tokens that it has read so far.
struct Reader {
    row: usize,
    adapter: usize,
    read: Vec<u32>,
    ids: Vec<u32>,
}

/// Feeds each reader its next `take` tokens in one call; returns the largest difference from each row alone.
fn read(
    decoder: &mut Decoder,
    base: &Arc<Base>,
    cases: &[Case],
    readers: &mut [Reader],
    take: impl Fn(usize) -> usize,
) -> f64 {
    for (index, reader) in readers.iter_mut().enumerate() {
        reader.ids = row((reader.row * 1000 + reader.read.len()) as u64, take(index), 0, SIZES.vocab).ids;
    }
    let given: Vec<RowTokens> =
        readers.iter().map(|reader| RowTokens { row: reader.row, ids: &reader.ids }).collect();
    let logits = decoder.feed_rows(&given).unwrap().to_vec();
    let mut worst = 0f64;
    for (reader, logits) in readers.iter_mut().zip(logits.chunks(SIZES.vocab)) {
        reader.read.extend(&reader.ids);
        assert_eq!(decoder.position_of(reader.row), reader.read.len());
        worst = worst.max(difference(logits, &alone(base, cases, reader.adapter, &reader.read)));
    }
    worst
}

#[test]
fn rows_of_any_lengths_and_adapters_give_what_each_gives_alone() {
    let random = base();
    let (base, cases) = (&random.base, adapters(&random.base));
    let mut decoder = together(base, &cases, 9, 620);
    // Rows out of order, with holes, neighbours of the same adapter and of others.
    let order = [(7, 0), (0, 1), (3, 1), (1, 2), (8, 3), (2, 3), (5, 4), (6, 5)];
    let mut readers: Vec<Reader> = order
        .into_iter()
        .map(|(row, adapter)| Reader { row, adapter, read: Vec::new(), ids: Vec::new() })
        .collect();
    for reader in &readers {
        decoder.assign(reader.row, reader.adapter).unwrap();
    }
    let lengths = [3, 1, 40, 9, 1, 1, 17, 600];
    let mut worst = read(&mut decoder, base, &cases, &mut readers, |index| lengths[index]);
    for _ in 0..3 {
        worst = worst.max(read(&mut decoder, base, &cases, &mut readers, |_| 1));
    }
    // Prompts together with single tokens, and some rows alone.
    worst = worst.max(read(&mut decoder, base, &cases, &mut readers[..7], |index| 1 + 5 * (index % 3)));
    worst = worst.max(read(&mut decoder, base, &cases, &mut readers[2..5], |_| 1));
    readers.swap(0, 6);
    worst = worst.max(read(&mut decoder, base, &cases, &mut readers, |_| 1));
    within(worst, LOGITS, "rows of different lengths and adapters");
}

/// With the same adapter everywhere no bit depends on where a row is or how long its neighbours are.
#[test]
fn rows_of_one_adapter_have_the_bits_of_rows_of_one_length() {
    let random = base();
    let (base, cases) = (&random.base, adapters(&random.base));
    for case in &cases {
        let new = |rows| {
            Decoder::new(Arc::clone(base), bindings(base, case), case.values.clone(), rows, 40).unwrap()
        };
        let prompt = row(1, 11, 0, SIZES.vocab).ids;
        let mut uniform = new(3);
        uniform.feed(&prompt).unwrap();
        uniform.fork(3);
        let expected = bits(&uniform.feed_each(&[4, 5, 6]).unwrap()[..SIZES.vocab]);

        let mut mixed = new(4);
        mixed.feed_rows(&[RowTokens { row: 2, ids: &prompt }]).unwrap();
        mixed.feed_rows(&[RowTokens { row: 3, ids: &prompt[..2] }]).unwrap();
        let given = [(2, &[4][..]), (3, &[1]), (0, &[9])].map(|(row, ids)| RowTokens { row, ids });
        let found = bits(&mixed.feed_rows(&given).unwrap()[..SIZES.vocab]);
        assert!(found == expected, "{}", case.name);
    }
}

#[test]
fn a_fork_is_a_fresh_prefill() {
    let random = base();
    let (base, cases) = (&random.base, adapters(&random.base));
    for adapter in 0..=cases.len() {
        let prompt = row(2, 90, 0, SIZES.vocab).ids;
        let mut forked = together(base, &cases, 5, 120);
        // The earlier content of the target rows is forgotten.
        forked.assign(0, 1).unwrap();
        forked.feed(&[1, 2, 3]).unwrap();
        forked.assign(2, adapter).unwrap();
        forked.feed_rows(&[RowTokens { row: 2, ids: &prompt }]).unwrap();
        forked.fork_to(2, &[4, 0]).unwrap();
        for row in [0, 4, 2] {
            assert_eq!(forked.position_of(row), prompt.len());
            let mut fresh = together(base, &cases, 5, 120);
            fresh.assign(row, adapter).unwrap();
            fresh.feed_rows(&[RowTokens { row, ids: &prompt }]).unwrap();
            for id in [7, 8] {
                let next = [RowTokens { row, ids: &[id] }];
                let expected = bits(fresh.feed_rows(&next).unwrap());
                assert!(bits(forked.feed_rows(&next).unwrap()) == expected, "adapter {adapter}, row {row}");
            }
        }
        assert_eq!(forked.position_of(1), 0);
    }
}

#[test]
fn rows_that_cannot_be_read_change_nothing() {
    let random = base();
    let (base, cases) = (&random.base, adapters(&random.base));
    let mut decoder = together(base, &cases, 2, 640);
    decoder.assign(1, 3).unwrap();
    decoder.feed_rows(&[RowTokens { row: 1, ids: &[1, 2, 3] }]).unwrap();
    let long = row(3, 633, 0, SIZES.vocab).ids;
    for (given, says) in [
        (vec![(1, &[1u32][..]), (1, &[2])], "row 1 is given tokens twice"),
        (vec![(0, &[1]), (2, &[2])], "row 2 is not one of the 2 that this decoder was prepared for"),
        (vec![(0, &[1]), (1, &[])], "0 tokens do not fit where 1 to 632 do"),
        // Its prefix of 5 takes positions that row 0 has.
        (vec![(0, &long), (1, &long)], "633 tokens do not fit where 1 to 632 do"),
        (vec![(0, &[1]), (1, &[61])], "token 61 is outside the vocabulary of 61"),
        (vec![], "no row is given any tokens"),
    ] {
        let given: Vec<RowTokens> = given.into_iter().map(|(row, ids)| RowTokens { row, ids }).collect();
        let error = decoder.feed_rows(&given).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!((decoder.position_of(0), decoder.position_of(1)), (0, 3));
    }
    for error in [decoder.assign(2, 0), decoder.assign(0, 6), decoder.fork_to(0, &[1, 2])] {
        assert!(error.unwrap_err().to_string().contains("is not one of the"));
    }
    assert_eq!(decoder.position_of(1), 3);
    decoder.assign(1, 1).unwrap();
    assert_eq!(decoder.position_of(1), 0);
}
