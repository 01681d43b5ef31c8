//! Adapters of the embedding, in sets made by hand: gradients against autograd, policies, the plan of memory, generation.

use std::sync::Arc;

use engraft::{
    data::Row,
    device::{
        Buffer, DType,
        arena::{Arenas, Placement},
    },
    engine::{Trainer, TrainerOptions},
    model::{
        AdapterBindings, Base, BaseDType, Decoder, Limits, Policy, PrefixState, Recompute, RowTokens, Stack,
        Trained,
    },
};
use engraft_adapters::{
    AdapterSet, AdapterSpec, EmbeddingDelta, Group, Layout, LoraSpec, Prompt, TensorSlot,
};
use engraft_util::rng;

use crate::{
    autograd,
    policies::{self, Outcome, options, same},
    setup::{
        Case, Sizes, batch, case, difference, golden, lora, pack, prefix, random_base, restore, row, state,
        wide, with_prompt, within,
    },
};

/// Bounds of docs/NUMERICS.md: generation against a full pass, and the same sums in another order.
pub const LOGITS: f64 = 5e-6;
pub const LOSS: f64 = 2e-6;
const GRADIENTS: f64 = 5e-6;

pub const SIZES: Sizes = Sizes { layers: 3, heads: 7, width: 35, inner: 53, positions: 40, vocab: 61 };

const RECOMPUTE: [Recompute; 5] =
    [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::Every(2), Recompute::All];

/// Adds a tensor of N(0, spread^2); a group for frozen tensors is made where one is needed.
fn tensor(case: &mut Case, name: &str, shape: &[usize], trainable: bool, spread: f32) -> usize {
    let Layout { tensors, len, groups } = &mut case.set.layout;
    let frozen = groups.iter().position(|group| *group == Group::FROZEN).unwrap_or_else(|| {
        groups.push(Group::FROZEN);
        groups.len() - 1
    });
    let (group, key) = (if trainable { 0 } else { frozen }, rng::key(&[5, rng::name(name)]));
    let slot =
        TensorSlot { name: name.to_owned(), shape: shape.to_vec(), offset: *len, group, method: "by hand" };
    case.values.extend((0..slot.len() as u64).map(|at| spread * rng::normal(key, at)));
    *len += slot.len();
    tensors.push(slot);
    tensors.len() - 1
}

/// A set with nothing in it.
pub fn empty(name: &'static str) -> Case {
    let set = AdapterSet {
        spec: AdapterSpec::from(lora("all-linear", 0.0)),
        layout: Layout::default(),
        loras: Vec::new(),
        vectors: Vec::new(),
        norms: Vec::new(),
        embedding: None,
        prefix: None,
        prompt: None,
        allocation: None,
    };
    Case { name, set, values: Vec::new() }
}

/// The set with a delta on the embedding.
pub fn with_delta(mut case: Case, base: &Base, rank: usize, trainable: (bool, bool)) -> Case {
    let (vocab, c) = (base.config.vocab, base.config.width);
    let a = tensor(&mut case, "embedding lora_A", &[rank, vocab], trainable.0, 0.3);
    let b = tensor(&mut case, "embedding lora_B", &[c, rank], trainable.1, 0.2);
    case.set.embedding = Some(EmbeddingDelta { rank, scale: 1.5, a, b });
    case
}

/// The set with virtual tokens.
pub fn with_virtual(mut case: Case, base: &Base, length: usize, trainable: bool) -> Case {
    let embeddings = tensor(&mut case, "prompt", &[length, base.config.width], trainable, 0.4);
    case.set.prompt = Some(Prompt { length, embeddings });
    case
}

fn top(base: &Base, dropout: f64) -> LoraSpec {
    LoraSpec { layers: Some(vec![base.config.layers - 1]), ..lora("all-linear", dropout) }
}

/// A delta of the embedding alone and beside everything else, with factors that are frozen, too.
fn deltas(base: &Base, dropout: f64) -> Vec<Case> {
    let both = (true, true);
    let beside = |name, lora, prefix| with_delta(case(name, base, lora, prefix), base, 5, both);
    let all = || Some(lora("all-linear", dropout));
    vec![
        with_delta(empty("a delta alone"), base, 3, both),
        with_delta(empty("A alone"), base, 3, (true, false)),
        with_delta(empty("B alone"), base, 1, (false, true)),
        beside("a delta beside a lora", all(), None),
        beside("a delta below a lora", Some(top(base, dropout)), None),
        beside("a delta beside a prefix", None, Some(prefix(5, None))),
        beside("a delta beside a lora and a projected prefix", all(), Some(prefix(5, Some(13)))),
        with_delta(case("a frozen delta", base, all(), None), base, 3, (false, false)),
    ]
}

/// Virtual tokens alone and beside everything else.
fn prompts(base: &Base, dropout: f64) -> Vec<Case> {
    let beside =
        |name, lora, prefix, length| with_virtual(case(name, base, lora, prefix), base, length, true);
    let all = || Some(lora("all-linear", dropout));
    let delta = |case| with_delta(case, base, 3, (true, true));
    vec![
        with_virtual(empty("a prompt alone"), base, 5, true),
        beside("a prompt beside a lora", all(), None, 1),
        beside("a prompt below a lora", Some(top(base, dropout)), None, 3),
        beside("a prompt after a prefix", None, Some(prefix(2, None)), 3),
        beside("a prompt after a projected prefix", all(), Some(prefix(1, Some(13))), 2),
        delta(beside("a prompt and a delta", all(), None, 2)),
        with_virtual(case("a frozen prompt", base, all(), None), base, 3, false),
    ]
}

/// All of them.
fn cases(base: &Base, dropout: f64) -> Vec<Case> {
    deltas(base, dropout).into_iter().chain(prompts(base, dropout)).collect()
}

#[test]
fn autograd_agrees_on_virtual_tokens() {
    let mut worst = autograd::Worst::new();
    for activation in ["gelu_new", "silu"] {
        let random = random_base(SIZES, activation);
        for dropout in [0.0, 0.2] {
            for case in prompts(&random.base, dropout) {
                for recompute in [Recompute::None, Recompute::All] {
                    autograd::check(&random.base, &case, 0.1, recompute, &mut worst);
                }
            }
        }
    }
    let base = golden("tiny");
    for case in prompts(&base, 0.0) {
        autograd::check(&base, &case, 0.0, Recompute::Every(2), &mut worst);
    }
    autograd::report(&worst, "with virtual tokens");
}

#[test]
fn autograd_agrees_on_a_delta_of_the_embedding() {
    let mut worst = autograd::Worst::new();
    for activation in ["gelu_new", "silu"] {
        let random = random_base(SIZES, activation);
        for dropout in [0.0, 0.2] {
            for case in deltas(&random.base, dropout) {
                for recompute in [Recompute::None, Recompute::All] {
                    autograd::check(&random.base, &case, 0.1, recompute, &mut worst);
                }
            }
        }
    }
    for name in ["tiny", "untied"] {
        let base = golden(name);
        deltas(&base, 0.0).iter().for_each(|case| {
            autograd::check(&base, case, 0.0, Recompute::Every(2), &mut worst);
        });
    }
    autograd::report(&worst, "with a delta of the embedding");
}

#[test]
fn autograd_agrees_on_a_delta_of_an_8_bit_embedding() {
    let random = random_base(Sizes { inner: 70, ..SIZES }, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let base = Arc::new(Base::load_as(&random.base.source, "coded", cache.path(), BaseDType::Q8).unwrap());
    let mut worst = autograd::Worst::new();
    deltas(&base, 0.0).iter().for_each(|case| {
        autograd::check(&base, case, 0.0, Recompute::None, &mut worst);
    });
    autograd::report(&worst, "with a delta of an 8-bit embedding");
}

/// Rows of different lengths, one of them packed.
pub fn rows(base: &Base, case: &Case) -> Vec<Row> {
    let vocab = SIZES.vocab;
    let packed = pack(&[row(2, 4, 0, vocab), row(3, 6, 1, vocab)]);
    let rows = [row(1, 11, 2, vocab), packed, row(4, 5, 1, vocab)];
    rows.iter().map(|row| with_prompt(row, base, case)).collect()
}

/// For rows of 11 tokens of text, with up to two prompts in them.
pub fn sized(case: &Case, policy: Policy) -> TrainerOptions {
    TrainerOptions { seq_len: 11 + 2 * case.set.prompt_len(), ..options(policy) }
}

/// Gradient of the first step, reports of three steps and the state after them.
fn run(base: &Arc<Base>, case: &Case, policy: Policy) -> Outcome {
    let mut trainer = policies::trainer(base, case, sized(case, policy));
    let batches = policies::cut(&rows(base, case), 2);
    trainer.accumulate(&batches).unwrap();
    let gradient = trainer.gradient();
    let reports = (0..3).map(|_| trainer.step(&batches, 1e-2).unwrap()).collect();
    (gradient, reports, state(&trainer))
}

#[test]
fn policies_change_no_bit() {
    let random = random_base(SIZES, "gelu_new");
    for case in cases(&random.base, 0.2) {
        let plain = run(&random.base, &case, Policy::default());
        for recompute in RECOMPUTE {
            for (stream, inputs) in
                [(false, Placement::Memory), (true, Placement::Disk), (true, Placement::Host)]
            {
                let policy = Policy { recompute, stream, inputs, ..Policy::default() };
                same(&run(&random.base, &case, policy), &plain, &format!("{}, {policy:?}", case.name));
            }
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| run(&random.base, &case, Policy::default()));
            same(&found, &plain, &format!("{}, {threads} threads", case.name));
        }
    }
}

#[test]
fn micro_batches_and_packing_are_the_big_batch() {
    let random = random_base(SIZES, "gelu_new");
    let mut worst = 0f64;
    for case in cases(&random.base, 0.0) {
        let with = |rows: &[Row], size: usize| {
            let mut trainer = policies::trainer(&random.base, &case, sized(&case, Policy::default()));
            let losses = trainer.accumulate(&policies::cut(rows, size)).unwrap();
            (losses.sum, trainer.gradient())
        };
        let (rows, vocab) = (rows(&random.base, &case), SIZES.vocab);
        let whole = with(&rows, 3);
        let apart = [row(1, 11, 2, vocab), row(2, 4, 0, vocab), row(3, 6, 1, vocab), row(4, 5, 1, vocab)];
        let apart = apart.map(|row| with_prompt(&row, &random.base, &case));
        for parts in [with(&rows, 2), with(&rows, 1), with(&apart, 2)] {
            within((parts.0 / whole.0 - 1.0).abs(), LOSS, "loss of micro-batches");
            worst = worst.max(trained_difference(&case, &parts.1, &whole.1));
        }
    }
    within(worst, GRADIENTS, "gradients of micro-batches, with a delta of the embedding");
}

/// As [`by_tensor`], of the tensors that are trained.
fn trained_difference(case: &Case, found: &[f32], expected: &[f32]) -> f64 {
    let layout = &case.set.layout;
    let trained = layout.tensors.iter().filter(|slot| layout.groups[slot.group].trainable);
    trained
        .map(|slot| {
            assert!(expected[slot.range()].iter().any(|&x| x != 0.0), "{}", slot.name);
            difference(&found[slot.range()], &wide(&expected[slot.range()]))
        })
        .fold(0.0, f64::max)
}

#[test]
fn what_is_planned_is_what_is_held() {
    let random = random_base(SIZES, "gelu_new");
    let plain = case("plain", &random.base, Some(lora("all-linear", 0.0)), None);
    let names = |case: &Case, recompute| {
        let options = sized(case, Policy { recompute, ..Policy::default() });
        let planned = Trainer::plan(&random.base.config, &case.set, options).unwrap();
        let held = policies::trainer(&random.base, case, options).memory();
        assert_eq!(format!("{planned:?}"), format!("{held:?}"), "{}", case.name);
        let extra = planned.iter().find(|row| row.name == "tokens by id");
        extra.map(|row| row.shape.clone())
    };
    for recompute in [Recompute::None, Recompute::All] {
        assert_eq!(names(&plain, recompute), None);
        for case in cases(&random.base, 0.0) {
            let trained = !case.name.contains("frozen");
            let cells = 4 * (11 + 2 * case.set.prompt_len());
            assert_eq!(names(&case, recompute), trained.then(|| vec![cells]), "{}", case.name);
        }
    }
}

#[test]
fn a_resumed_run_goes_on_bit_for_bit() {
    let random = random_base(SIZES, "gelu_new");
    for case in cases(&random.base, 0.2) {
        let batches = policies::cut(&rows(&random.base, &case), 2);
        let options = sized(&case, Policy::default());
        let mut whole = policies::trainer(&random.base, &case, options);
        whole.step(&batches, 1e-2).unwrap();
        let saved = state(&whole);
        let next = whole.step(&batches, 1e-2).unwrap();
        let fresh = Case { name: case.name, set: case.set.clone(), values: vec![0.5; case.values.len()] };
        let mut second = policies::trainer(&random.base, &fresh, options);
        restore(&mut second, &saved).unwrap();
        assert_eq!(second.step(&batches, 1e-2).unwrap(), next, "{}", case.name);
        assert_eq!(state(&second), state(&whole), "{}", case.name);
    }
}

pub fn bindings(base: &Base, case: &Case) -> AdapterBindings {
    AdapterBindings::new(&[(&case.set, 1.0)], base.config.layers).unwrap()
}

pub fn decoder(base: &Arc<Base>, case: &Case, rows: usize, capacity: usize) -> Decoder {
    Decoder::new(Arc::clone(base), bindings(base, case), case.values.clone(), rows, capacity).unwrap()
}

/// The loss of every token but the first of `ids`, by the forward of training.
fn loss_in_training(base: &Arc<Base>, case: &Case, ids: &[u32]) -> f64 {
    let mut of = row(1, ids.len(), 0, SIZES.vocab);
    of.ids = ids.to_vec();
    of.targets = ids[1..].iter().map(|&id| id as i32).chain([engraft::data::NO_LOSS]).collect();
    let mut of = with_prompt(&of, base, case);
    let behind = case.set.prompt_len();
    of.targets[..behind].fill(engraft::data::NO_LOSS);
    let limits = Limits { rows: 1, tokens: of.ids.len() };
    let bindings = bindings(base, case);
    let mut arenas = Arenas::real(None);
    let mut prefix = PrefixState::new(&bindings, &base.config, DType::F32, false, &mut arenas).unwrap();
    let policy = Policy::default();
    let mut stack = Stack::new(Arc::clone(base), bindings, limits, policy, false, &mut arenas).unwrap();
    let store = Buffer::from_slice(&case.values).unwrap();
    prefix.iter_mut().for_each(|prefix| prefix.refresh(store.view()));
    let prefix = prefix.as_ref().map(|prefix| prefix.view(store.view()));
    stack.loss(Trained { values: store.view(), prefix }, &batch(&[of])).unwrap().sum
}

#[test]
fn generation_is_the_forward_of_training() {
    let random = random_base(SIZES, "gelu_new");
    let ids = row(4, 31, 0, SIZES.vocab).ids;
    let mut worst = 0f64;
    for case in cases(&random.base, 0.0) {
        for first in [1, 13] {
            let mut decoder = decoder(&random.base, &case, 1, ids.len());
            let (mut sum, mut read) = (0.0, 0);
            let lengths = std::iter::once(first).chain(std::iter::repeat(1));
            let expected = loss_in_training(&random.base, &case, &ids);
            for len in lengths {
                let Some(&next) = ids.get(read + len) else { break };
                // Of a chunk only the last token has logits: those before are read one by one elsewhere.
                let z = wide(decoder.feed(&ids[read..read + len]).unwrap());
                read += len;
                sum += z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[next as usize];
            }
            if first == 1 {
                worst = worst.max((sum / expected - 1.0).abs());
            } else {
                let before = loss_in_training(&random.base, &case, &ids[..first]);
                worst = worst.max(((sum + before) / expected - 1.0).abs());
            }
        }
    }
    within(worst, LOSS, "losses of a decoder, with adapters of the embedding");
}

/// Rows with different adapters in one pass, forked and cut: each has the logits that it has alone.
#[test]
fn rows_of_a_decoder_have_their_own_embedding() {
    let random = random_base(SIZES, "gelu_new");
    let base = &random.base;
    let cases = cases(base, 0.0);
    let rows = cases.len() + 1;
    let ids = row(6, rows + 3, 0, SIZES.vocab).ids;
    let alone = |case: Option<&Case>, ids: &[u32]| {
        let bare = || Decoder::new(Arc::clone(base), AdapterBindings::none(3), Vec::new(), 1, 20).unwrap();
        wide(case.map_or_else(bare, |case| decoder(base, case, 1, 20)).feed(ids).unwrap())
    };
    let mut together =
        Decoder::new(Arc::clone(base), AdapterBindings::none(3), Vec::new(), rows, 30).unwrap();
    for (row, case) in (1..).zip(&cases) {
        let number = together.add_adapter(bindings(base, case), case.values.clone()).unwrap();
        together.assign(row, number).unwrap();
    }
    let of = |row: usize| row.checked_sub(1).map(|at| &cases[at]);
    let tokens: Vec<RowTokens> = (0..rows).map(|row| RowTokens { row, ids: &ids[row..] }).collect();
    let mut found: Vec<(usize, Vec<u32>, Vec<f32>)> = Vec::new();
    let logits = together.feed_rows(&tokens).unwrap().chunks(SIZES.vocab);
    found.extend(logits.enumerate().map(|(row, z)| (row, ids[row..].to_vec(), z.to_vec())));
    let next: Vec<u32> = (0..rows as u32).map(|row| 3 * row + 1).collect();
    let logits = together.feed_each(&next).unwrap().chunks(SIZES.vocab);
    let read = |row: usize| [&ids[row..], &next[row..=row]].concat();
    found.extend(logits.enumerate().map(|(row, z)| (row, read(row), z.to_vec())));
    // Row 2 takes over all that row 9, with a prompt, has read; rows 5 and 10 go on from their second token, row 12 anew.
    together.fork_to(9, &[2]).unwrap();
    [(5, 2), (10, 2), (12, 0)].into_iter().for_each(|(row, tokens)| together.truncate(row, tokens));
    let positions = [2, 5, 10, 12].map(|row| together.position_of(row));
    assert_eq!(positions, [rows + 3 - 9 + 1, 2, 2, 0]);
    let next = [(2, &[7, 8][..]), (5, &[9]), (10, &[3, 1]), (12, &[4])];
    let tokens = next.map(|(row, ids)| RowTokens { row, ids });
    let logits = together.feed_rows(&tokens).unwrap();
    let before = [read(9), ids[5..7].to_vec(), ids[10..12].to_vec(), Vec::new()];
    for (at, ((row, ids), before)) in next.into_iter().zip(before).enumerate() {
        let row = if row == 2 { 9 } else { row };
        found.push((row, [&before, ids].concat(), logits[at * SIZES.vocab..][..SIZES.vocab].to_vec()));
    }
    let worst = found.iter().map(|(row, ids, z)| difference(z, &alone(of(*row), ids))).fold(0.0, f64::max);
    within(worst, LOGITS, "rows of a decoder with adapters of the embedding");
    for case in &cases {
        let changed = alone(Some(case), &ids).iter().map(|&z| z as f32).collect::<Vec<_>>();
        assert!(difference(&changed, &alone(None, &ids)) > 1e-2, "{} does nothing", case.name);
    }
}

/// Deltas of several sets add up, each times its factor.
#[test]
fn deltas_of_several_sets_add_up() {
    let random = random_base(SIZES, "gelu_new");
    let base = &random.base;
    let ids = row(7, 9, 0, SIZES.vocab).ids;
    let first = with_delta(empty("first"), base, 2, (true, true));
    let mut second = with_delta(empty("second"), base, 3, (true, true));
    second.values.iter_mut().for_each(|value| *value = 0.7 - *value);
    let logits = |sets: &[(&AdapterSet, f32)], values: Vec<f32>| {
        let bindings = AdapterBindings::new(sets, SIZES.layers).unwrap();
        let mut decoder = Decoder::new(Arc::clone(base), bindings, values, 1, 20).unwrap();
        decoder.feed(&ids).unwrap().to_vec()
    };
    let both = [first.values.clone(), second.values.clone()].concat();
    let found = logits(&[(&first.set, 0.5), (&second.set, -1.25)], both);
    // One delta of rank 5 whose B holds the factors.
    let mut joined = with_delta(empty("joined"), base, 5, (true, true));
    let (v, c) = (SIZES.vocab, SIZES.width);
    joined.values[..2 * v].copy_from_slice(&first.values[..2 * v]);
    joined.values[2 * v..5 * v].copy_from_slice(&second.values[..3 * v]);
    for j in 0..c {
        let to = &mut joined.values[5 * v + 5 * j..][..5];
        (0..2).for_each(|r| to[r] = 0.5 * first.values[2 * v + 2 * j + r]);
        (0..3).for_each(|r| to[2 + r] = -1.25 * second.values[3 * v + 3 * j + r]);
    }
    let expected = logits(&[(&joined.set, 1.0)], joined.values.clone());
    within(difference(&found, &wide(&expected)), LOGITS, "two deltas of the embedding");
    let other = logits(&[(&first.set, 1.0)], first.values.clone());
    assert!(difference(&other, &wide(&expected)) > 1e-2);
}

/// A step moves the columns of A of the ids that a loss depends on, and no others; B moves whole.
#[test]
fn a_step_moves_the_columns_of_its_tokens() {
    let random = random_base(SIZES, "gelu_new");
    let case = with_delta(empty("a delta alone"), &random.base, 3, (true, true));
    let mut trainer = policies::trainer(&random.base, &case, options(Policy::default()));
    // The last two tokens have no loss and nothing after them.
    let mut one = row(1, 11, 0, SIZES.vocab);
    one.targets[9..].fill(engraft::data::NO_LOSS);
    trainer.step(&[batch(std::slice::from_ref(&one))], 1e-2).unwrap();
    let values = trainer.values();
    let moved: Vec<bool> = values.iter().zip(&case.values).map(|(a, b)| a != b).collect();
    let (a, b) = moved.split_at(3 * SIZES.vocab);
    assert!(b.iter().all(|&moved| moved), "B");
    for (at, &moved) in a.iter().enumerate() {
        let read = one.ids[..9].contains(&((at % SIZES.vocab) as u32));
        assert_eq!(moved, read, "A of id {}", at % SIZES.vocab);
    }
}
