//! Tests of loading: counts, fingerprints, splits, errors that only a whole file shows.

use std::fs;

use super::*;
use crate::data::Batch;
use crate::data::testing::{END, VOCAB, ids, options, tokenizer};

fn text(name: &str, content: &str, options: &DataOptions) -> Result<Dataset> {
    let kind = if name.ends_with(".txt") { Kind::Text } else { Kind::Jsonl };
    load_text(name, content.as_bytes(), kind, Some(&tokenizer()), options)
}

fn targets(dataset: &Dataset) -> Vec<u32> {
    let all = dataset.rows.iter().flat_map(|row| row.targets.iter().copied());
    all.filter_map(|target| u32::try_from(target).ok()).collect()
}

#[test]
fn every_token_of_a_text_but_the_first_is_a_target_once() {
    let content = "hello the end, it's the hell\nhello";
    let mut expected = ids(content);
    expected.push(END);
    for seq_len in 1..=expected.len() + 1 {
        for pack in [false, true] {
            let dataset = text("a.txt", content, &DataOptions { pack, ..options(seq_len) }).unwrap();
            assert_eq!(targets(&dataset), expected[1..], "seq_len {seq_len}");
            let inputs: Vec<u32> = dataset.rows.iter().flat_map(|row| row.ids.to_vec()).collect();
            assert_eq!(inputs, expected[..expected.len() - 1]);
            assert!(dataset.rows.iter().all(|row| row.ids.len() <= seq_len));
            assert_eq!(dataset.report.rows, (expected.len() - 1).div_ceil(seq_len));
        }
    }
}

#[test]
fn counts_are_of_this_data() {
    let content = "{\"prompt\":\"ab\",\"completion\":\"c\"}\n{\"text\":\"\"}\n{\"text\":\"abcdef\"}\n\
        {\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n{\"input_ids\":[1,2],\"labels\":[1,2]}\n";
    let dataset = text("d.jsonl", content, &options(4)).unwrap();
    // The chat is "user:\na\n\n", of which 4 tokens are kept; the text fills two rows.
    let chat = ids("user:\na\n\n").len();
    let expected = DataReport {
        records: 5,
        documents: 3,
        rows: 4,
        tokens: 11,
        supervised: 9,
        truncated: 1,
        read_tokens: 3 + 6 + chat + 2,
        cut_tokens: chat - 4,
        longest_record: chat,
        dropped: 2,
    };
    assert_eq!(dataset.report, expected);
    let lost = percent((chat - 4) as f64 / (11 + chat) as f64);
    assert_eq!(
        dataset.report.to_string(),
        format!(
            "5 records, 4 rows, 11 tokens (9 supervised), 1 cut to the row length ({lost} of the tokens lost), \
             2 dropped without a supervised token"
        )
    );
    let one = text("a.txt", "a", &options(4)).unwrap();
    assert_eq!(one.report.to_string(), "1 record, 1 row, 1 token (1 supervised)");
    assert_eq!((dataset.longest(), one.longest()), (4, 1));
}

#[test]
fn id_records_are_one_a_row_or_packed_and_get_no_end_of_text() {
    let content = "{\"input_ids\":[1,2,3],\"labels\":[1,2,3]}\n{\"input_ids\":[4,5],\"labels\":[4,5]}\n";
    let load = |pack| {
        load_text("i.jsonl", content.as_bytes(), Kind::Jsonl, None, &DataOptions { pack, ..options(8) })
    };
    let rows = load(false).unwrap().rows;
    assert_eq!((rows.len(), rows.get(1).ids, rows.get(1).targets), (2, &[4, 5][..], &[5, NO_LOSS][..]));
    let packed = load(true).unwrap().rows;
    assert_eq!(packed.len(), 1);
    assert_eq!(packed.get(0).targets, [2, 3, NO_LOSS, 5, NO_LOSS], "3 never predicts 4");
    let batch = Batch::new(&[packed.get(0)]);
    assert_eq!((&batch.positions[..], &batch.starts[..]), (&[0, 1, 2, 0, 1][..], &[0, 0, 0, 3, 3][..]));
}

#[test]
fn lines_are_documents_when_asked() {
    let by_line = DataOptions { line_by_line: true, ..options(8) };
    let dataset = text("a.txt", "ab\n\ncd\n", &by_line).unwrap();
    assert_eq!((dataset.report.records, dataset.report.rows), (2, 2));
    assert_eq!(targets(&dataset), [ids("b"), vec![END], ids("d"), vec![END]].concat());
}

#[test]
fn files_are_read_in_order_into_one_data_set() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.txt"), "ab").unwrap();
    fs::write(folder.path().join("x.jsonl"), "{\"text\":\"cd\"}").unwrap();
    let sources = [folder.path().join("x.jsonl"), folder.path().to_owned()];
    let dataset = load(&sources, Split::Train, Some(&tokenizer()), &options(8)).unwrap();
    assert_eq!(targets(&dataset), [ids("d"), vec![END], ids("b"), vec![END]].concat());
    fs::write(folder.path().join("x.jsonl"), "{\"text\":\"cd\"}\n{]").unwrap();
    let error = load(&sources, Split::Train, Some(&tokenizer()), &options(8)).unwrap_err().to_string();
    assert!(error.contains("x.jsonl:2: is not JSON"), "{error}");
}

#[test]
fn the_first_bad_line_is_reported() {
    let content = "{\"text\":\"a\"}\n".repeat(50);
    let error =
        load_text("t.jsonl", content.as_bytes(), Kind::Jsonl, None, &options(8)).unwrap_err().to_string();
    assert!(error.starts_with("t.jsonl:1: is text, and the base has no tokenizer"), "{error}");
    let error = load_text("t.txt", b"a", Kind::Text, None, &options(8)).unwrap_err().to_string();
    assert!(error.starts_with("t.txt: is text"), "{error}");
}

#[test]
fn data_without_any_target_is_refused() {
    let content = "{\"prompt\":\"abcd\",\"completion\":\"e\"}";
    let error = text("d.jsonl", content, &options(3)).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().starts_with("d.jsonl: nothing is supervised in 1 record; "), "{error}");
    assert!(text("d.jsonl", content, &options(4)).is_ok(), "the completion is the target of the 4th input");
}

#[test]
fn options_that_do_not_fit_the_base_are_refused() {
    let refused = |options: DataOptions| text("a.txt", "ab", &options).unwrap_err().to_string();
    assert!(refused(options(0)).starts_with("--seq-len: is 0"));
    assert!(refused(DataOptions { vocab: 100, end_of_text: 99, ..options(4) }).contains("267 tokens"));
    assert!(refused(DataOptions { end_of_text: 267, ..options(4) }).contains("end-of-text token 267"));
}

#[test]
fn the_fingerprint_is_of_the_rows() {
    let print = |content: &str, pack| {
        text("d.jsonl", content, &DataOptions { pack, ..options(8) }).unwrap().fingerprint
    };
    let two = "{\"text\":\"ab\"}\n{\"text\":\"cd\"}";
    assert_eq!(print(two, false), print(&two.replace('\n', "\n\n"), false));
    assert_eq!(print(two, false).len(), 64);
    assert_ne!(print(two, false), print("{\"text\":\"cd\"}\n{\"text\":\"ab\"}", false));
    assert_ne!(print(two, false), print(two, true));
    let ids = |label| print(&format!("{{\"input_ids\":[1,2,3],\"labels\":[1,{label},3]}}"), false);
    assert_ne!(ids(2), ids(-100));
}

#[test]
fn a_split_is_a_partition_that_keeps_order() {
    let content: String = (b'a'..=b'z').map(|letter| format!("{}!\n", letter as char)).collect();
    let all = text("a.txt", &content, &DataOptions { line_by_line: true, ..options(4) }).unwrap();
    let (kept, held) = all.clone().split(0.2, 5).unwrap();
    assert_eq!((kept.rows.len(), held.rows.len()), (21, 5));
    let mut merged: Vec<_> = kept.rows.iter().chain(held.rows.iter()).map(|row| row.ids[0]).collect();
    for part in [&kept, &held] {
        assert!(part.rows.iter().is_sorted_by_key(|row| row.ids[0]));
        assert_eq!((part.report.rows, part.report.records), (part.rows.len(), 26));
        assert_eq!(part.report.supervised, 2 * part.rows.len());
    }
    merged.sort_unstable();
    assert_eq!(merged, all.rows.iter().map(|row| row.ids[0]).collect::<Vec<_>>());
    assert_eq!(all.clone().split(0.2, 5).unwrap().1, held, "the same seed, the same rows");
    assert_ne!(all.clone().split(0.2, 6).unwrap().1.rows, held.rows);
    assert_eq!(all.clone().split(0.001, 5).unwrap().1.rows.len(), 1);
    assert_eq!(all.clone().split(0.999, 5).unwrap().0.rows.len(), 1);
    for fraction in [0.0, 1.0, -0.5, f64::NAN] {
        assert!(all.clone().split(fraction, 5).unwrap_err().to_string().starts_with("--eval-fraction: is "));
    }
    let single = text("a.txt", "a", &options(4)).unwrap().split(0.5, 5).unwrap_err().to_string();
    assert!(single.contains("a single row"), "{single}");
}

#[test]
fn batches_hold_every_row_once() {
    let content = "a\nbc\nd\nef\ng";
    let dataset = text("a.txt", content, &DataOptions { line_by_line: true, ..options(4) }).unwrap();
    let batches: Vec<Batch> = dataset.batches(2).collect();
    assert_eq!(batches.iter().map(|batch| batch.rows).collect::<Vec<_>>(), [2, 2, 1]);
    assert_eq!(batches.iter().map(Batch::supervised).sum::<usize>(), dataset.report.supervised);
    let chosen = dataset.batch(&[4, 1, 99]);
    assert_eq!((chosen.rows, chosen.seq_len, &chosen.ids[..2]), (2, 2, &[ids("g")[0], 0][..]));
}

/// `seq_len` counts text: windows, counts and cuts are as without a prompt, and rows have its positions more. It
/// predicts the first token of each document, which nothing predicts without it.
#[test]
fn a_prompt_is_no_part_of_the_text() {
    let content = "hello the end\nab\nc\nit's the hell of a line\nd\n";
    for pack in [false, true] {
        let with = |prompt: usize| {
            let options = DataOptions { pack, prompt, line_by_line: true, ..options(6) };
            text("a.txt", content, &options).unwrap()
        };
        let (plain, prompted) = (with(0), with(3));
        let of = |data: &Dataset| data.rows.iter().flat_map(|row| row.text(VOCAB)).collect::<Vec<_>>();
        assert_eq!(of(&prompted), of(&plain));
        let every: Vec<u32> = content.lines().flat_map(|line| ids(line).into_iter().chain([END])).collect();
        assert_eq!(targets(&prompted), every);
        let counts = |data: &Dataset| (data.report.tokens, data.report.documents);
        assert_eq!(counts(&prompted), counts(&plain));
        assert_eq!(prompted.report.supervised, plain.report.supervised + 5);
        assert_eq!((plain.longest(), prompted.longest()), (6, 9));
        assert_ne!(prompted.fingerprint, plain.fingerprint);
        let first = [VOCAB as u32, VOCAB as u32 + 1, VOCAB as u32 + 2];
        for row in prompted.rows.iter() {
            let starts = (0..row.ids.len()).filter(|&at| row.starts[at] as usize == at);
            starts.for_each(|at| assert_eq!(row.ids[at..at + 3], first));
        }
        let (kept, held) = prompted.split(0.3, 1).unwrap();
        assert_eq!(kept.report.tokens + held.report.tokens, plain.report.tokens);
    }
}
