//! Virtual tokens alone: how a decoder counts them, rows that lack them, what they learn, what they may start from.

use std::sync::Arc;

use engraft::{
    device::arena::Arenas,
    engine::{Evaluator, Trainer, TrainerOptions},
    model::{AdapterBindings, Base, BaseDType, Decoder, Limits, Policy, RowTokens},
};
use engraft_adapters::BaseWeights;

use crate::{
    embedding_parts::{LOGITS, LOSS, SIZES, bindings, decoder, empty, rows, sized, with_delta, with_virtual},
    policies,
    setup::{Case, Sizes, bits, case, difference, prefix, random_base, row, state, wide, within},
};

/// Chunks of the pass, forks and cuts at every place, in a decoder of one adapter with virtual tokens.
#[test]
fn a_decoder_counts_its_virtual_tokens() {
    let sizes = Sizes { layers: 2, positions: 640, ..SIZES };
    let random = random_base(sizes, "gelu_new");
    let base = &random.base;
    let case = with_virtual(case("a prompt", base, None, Some(prefix(4, None))), base, 7, true);
    let ids = row(3, 600, 0, sizes.vocab).ids;
    let whole = wide(decoder(base, &case, 1, 600).feed(&ids).unwrap());
    let mut worst = 0f64;
    // A pass of 512 tokens ends inside the text, whatever is read first.
    for first in [1, 2, 505, 506, 599] {
        let mut decoder = decoder(base, &case, 3, 629);
        assert_eq!((decoder.capacity(), decoder.position()), (629, 0));
        decoder.feed(&ids[..first]).unwrap();
        assert_eq!(decoder.position(), first);
        decoder.fork(3);
        worst = worst.max(difference(decoder.feed(&ids[first..]).unwrap(), &whole));
        let other = [RowTokens { row: 2, ids: &ids[first..] }];
        worst = worst.max(difference(decoder.feed_rows(&other).unwrap(), &whole));
        decoder.rewind(first);
        assert_eq!((decoder.position(), decoder.position_of(2)), (first, 0));
        worst = worst.max(difference(decoder.feed(&ids[first..]).unwrap(), &whole));
    }
    within(worst, LOGITS, "a prompt in chunks");
    let mut again = decoder(base, &case, 1, 629);
    let first = bits(again.feed(&ids[..30]).unwrap());
    again.rewind(0);
    assert_eq!(bits(again.feed(&ids[..30]).unwrap()), first, "nothing is left of what it has read");
    // 640 positions less 4 of the prefix and 7 of the prompt.
    again.rewind(0);
    let error = again.feed(&vec![1; 630]).unwrap_err().to_string();
    assert!(error.contains("630 tokens do not fit where 1 to 629 do"), "{error}");
    again.feed(&ids[..30]).unwrap();
    let error = again.feed(&vec![1; 600]).unwrap_err().to_string();
    assert!(error.contains("600 tokens do not fit where 1 to 599 do"), "{error}");
    let long = Decoder::new(Arc::clone(base), bindings(base, &case), case.values.clone(), 1, 630);
    let error = long.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("630 tokens after a prefix of 4 and a prompt of 7 virtual tokens"), "{error}");
    assert!(error.contains("--seq-len 629 or less"), "{error}");
    // A decoder that was made for fewer tokens than the prompt has.
    let mut small = Decoder::new(Arc::clone(base), AdapterBindings::none(2), Vec::new(), 1, 7).unwrap();
    let error = small.add_adapter(bindings(base, &case), case.values.clone()).unwrap_err().to_string();
    assert!(
        error.contains("a prompt of 7 virtual tokens leaves no room in a decoder for 7 tokens"),
        "{error}"
    );
    let error = small.feed(&[61]).unwrap_err().to_string();
    assert!(error.contains("token 61 is outside the vocabulary"), "{error}");
}

#[test]
fn rows_without_the_prompt_are_refused() {
    let random = random_base(SIZES, "gelu_new");
    let case = with_virtual(empty("a prompt"), &random.base, 3, true);
    let plain = case_without(&random.base);
    let good = policies::cut(&rows(&random.base, &case), 2);
    let mut trainer = policies::trainer(&random.base, &case, sized(&case, Policy::default()));
    let before = state(&trainer);
    let mut outside = good.clone();
    outside[1].ids[4] = SIZES.vocab as u32 + 3;
    // An id of the prompt inside a text.
    let mut inside = good.clone();
    inside[1].ids[4] = SIZES.vocab as u32 + 1;
    for (batches, says) in [
        (policies::cut(&rows(&random.base, &plain), 2), "instead of the 3 virtual tokens of the prompt"),
        (inside, "token 62 is outside the vocabulary of 61"),
        (outside, "token 64 is outside the vocabulary of 61"),
    ] {
        let error = trainer.step(&batches, 1e-2).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert_eq!(state(&trainer), before);
    }
    trainer.step(&good, 1e-2).unwrap();
    let mut without = policies::trainer(&random.base, &plain, sized(&plain, Policy::default()));
    let error = without.step(&good, 1e-2).unwrap_err().to_string();
    assert!(error.contains("is larger than") || error.contains("outside the vocabulary"), "{error}");
    let long = TrainerOptions { seq_len: 44, ..sized(&case, Policy::default()) };
    let long = Trainer::new(Arc::clone(&random.base), case.set, &case.values, long, Arenas::real(None));
    let error = long.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("41 tokens after a prompt of 3 virtual tokens"), "{error}");
    assert!(error.contains("--seq-len 37 or less"), "{error}");
}

/// A set with a delta alone.
fn case_without(base: &Base) -> Case {
    with_delta(empty("no prompt"), base, 3, (true, true))
}

/// Training lowers the loss of rows by moving a prompt alone; an evaluator without memory for training says the same.
#[test]
fn a_prompt_learns() {
    let random = random_base(SIZES, "gelu_new");
    let base = &random.base;
    let case = with_virtual(empty("a prompt"), base, 5, true);
    let batches = policies::cut(&rows(base, &case), 3);
    let options = TrainerOptions { label_smoothing: 0.0, ..sized(&case, Policy::default()) };
    let mut trainer = policies::trainer(base, &case, options);
    let losses: Vec<f64> = (0..30).map(|_| trainer.step(&batches, 3e-2).unwrap().loss).collect();
    assert!(losses[29] < 0.8 * losses[0], "{losses:?}");
    let found = trainer.evaluate(&mut batches.clone().into_iter()).unwrap();
    let values = trainer.values().to_vec();
    let limits = Limits { rows: 3, tokens: options.seq_len };
    let mut evaluator = Evaluator::new(Arc::clone(base), Some((&case.set, &values)), limits, 5).unwrap();
    let again = evaluator.evaluate(&mut batches.into_iter()).unwrap();
    assert_eq!(again.tokens, found.tokens);
    within((again.loss / found.loss - 1.0).abs(), LOSS, "an evaluator with a prompt");
}

/// Rows of the embedding, as an initial prompt reads them.
#[test]
fn rows_of_the_embedding_are_handed_out() {
    let random = random_base(Sizes { width: 70, ..SIZES }, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let coded = Base::load_as(&random.base.source, "coded", cache.path(), BaseDType::Q8).unwrap();
    for base in [&*random.base, &coded] {
        let whole = base.weights.wte.view().to_floats();
        let found = base.token_embeddings(&[7, 60, 0, 7]).unwrap();
        let expected: Vec<f32> =
            [7, 60, 0, 7].iter().flat_map(|id| &whole[id * 70..][..70]).copied().collect();
        assert_eq!(found, expected);
        assert!(base.token_embeddings(&[3, 61]).is_none());
    }
}
