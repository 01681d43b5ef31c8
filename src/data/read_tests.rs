//! Compares reading in parts with a plain twin that keeps everything in memory.

use super::*;
use crate::data::testing::{options, tokenizer};
use crate::data::{NO_LOSS, Row};

/// Sizes of chunks and groups, from absurd to the real ones.
const PARTS: [(usize, usize); 5] = [(1, 1), (5, 2), (64, 3), (5000, 100), (CHUNK, GROUP)];

/// Counts and fingerprint of a data set.
#[derive(Debug, PartialEq)]
struct Outcome {
    rows: Vec<Row>,
    report: DataReport,
    fingerprint: String,
}

fn parts(
    bytes: &[u8],
    kind: Kind,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
    chunk: usize,
    group: usize,
) -> Result<Outcome, String> {
    let mut reader = Reader::in_parts(tokenizer, options, chunk, group);
    let read = reader.read("d", bytes, kind);
    let dataset = read.and_then(|()| reader.finish("d")).map_err(|error| error.to_string())?;
    let owned = |row: crate::data::RowRef| Row {
        ids: row.ids.to_vec(),
        targets: row.targets.to_vec(),
        starts: row.starts.to_vec(),
    };
    let rows = dataset.rows.iter().map(owned).collect();
    Ok(Outcome { rows, report: dataset.report, fingerprint: dataset.fingerprint })
}

/// All bytes, then all records, then all documents, then all rows.
fn plain(
    bytes: &[u8],
    kind: Kind,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
) -> Result<Outcome, String> {
    let text = plain_text(bytes)?;
    let records = plain_records(text, kind, options)?;
    if records.is_empty() {
        return Err("d: is empty; give a file with text or records".to_owned());
    }
    let mut report = DataReport { records: records.len(), ..DataReport::default() };
    let mut rows: Vec<Row> = Vec::new();
    for (line, record) in &records {
        let line = (records.len() > 1 || kind == Kind::Jsonl).then_some(*line);
        let document = Document::new(record, tokenizer, options)
            .map_err(|error| SourceLine { name: "d", line }.error(error).to_string())?;
        report.truncated += usize::from(document.lost > 0);
        report.cut_tokens += document.lost;
        report.read_tokens += document.ids.len() + document.lost;
        if matches!(record, Record::Completion { .. } | Record::Messages(_) | Record::Ids { .. }) {
            report.longest_record = report.longest_record.max(document.ids.len() + document.lost);
        }
        plain_windows(&document, options, &mut rows, &mut report);
    }
    if rows.is_empty() {
        return Err(format!(
            "d: nothing is supervised in {} record{}; give completions, answers of the assistant, or labels \
             other than -100, within the first {} tokens",
            report.records,
            if report.records == 1 { "" } else { "s" },
            options.seq_len
        ));
    }
    report.rows = rows.len();
    let mut numbers = (rows.len() as u64).to_le_bytes().to_vec();
    for row in &rows {
        report.tokens += row.ids.len();
        report.supervised += row.targets.iter().filter(|&&target| target != NO_LOSS).count();
        let all = row.ids.iter().copied().chain(row.targets.iter().map(|&target| target as u32));
        numbers.extend((row.ids.len() as u32).to_le_bytes());
        numbers.extend(all.chain(row.starts.iter().copied()).flat_map(u32::to_le_bytes));
    }
    Ok(Outcome { rows, report, fingerprint: blake3::hash(&numbers).to_hex().to_string() })
}

fn plain_text(bytes: &[u8]) -> Result<&str, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        let line = 1 + bytes[..at].iter().filter(|&&byte| byte == b'\n').count();
        format!("d:{line}: is not UTF-8 (byte 0x{:02x} at offset {at}); convert the file to UTF-8", bytes[at])
    })?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

fn plain_records(text: &str, kind: Kind, options: &DataOptions) -> Result<Vec<(usize, Record)>, String> {
    if kind == Kind::Text && !options.line_by_line {
        let whole = (!text.is_empty()).then(|| (1, Record::File(text.to_owned())));
        return Ok(whole.into_iter().collect());
    }
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let parser = Parser::new(kind, &options.read.keys, options.vocab);
    let record = |(line, text)| {
        let place = SourceLine { name: "d", line: Some(line) };
        let parsed = parser.parse(place, text);
        parsed.map(|parsed| (line, parsed.record)).map_err(|error| error.to_string())
    };
    lines.map(record).collect()
}

fn plain_windows(document: &Document, options: &DataOptions, rows: &mut Vec<Row>, report: &mut DataReport) {
    let mut kept = 0;
    let windows = document.ids.chunks(options.seq_len).zip(document.targets.chunks(options.seq_len));
    for (ids, targets) in windows {
        if targets.iter().all(|&target| target == NO_LOSS) {
            report.dropped += 1;
            continue;
        }
        kept += 1;
        let open =
            rows.last().is_some_and(|row| options.pack && row.ids.len() + ids.len() <= options.seq_len);
        if !open {
            rows.push(Row::default());
        }
        let Some(row) = rows.last_mut() else { continue };
        let start = row.ids.len() as u32;
        row.ids.extend(ids);
        row.targets.extend(targets);
        row.starts.resize(row.ids.len(), start);
    }
    report.dropped += usize::from(document.ids.is_empty());
    report.documents += usize::from(kept > 0);
}

fn same(bytes: &[u8], kind: Kind, tokenizer: Option<&Tokenizer>, options: &DataOptions) {
    let expected = plain(bytes, kind, tokenizer, options);
    for (chunk, group) in PARTS {
        // Whole reports of long data would say nothing.
        let found = parts(bytes, kind, tokenizer, options, chunk, group);
        let beginning = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
        match (&found, &expected) {
            (Ok(found), Ok(expected)) if found == expected => {}
            (Err(found), Err(expected)) => assert_eq!(found, expected, "{chunk} {group} {beginning:?}"),
            _ => panic!(
                "{chunk} {group} {options:?} {beginning:?}: {:?} for {:?}",
                found.map(|found| found.report),
                expected.map(|expected| expected.report)
            ),
        }
    }
}

fn all_options() -> impl Iterator<Item = DataOptions> {
    [1, 3, 8].into_iter().flat_map(|seq_len| {
        [(false, false), (true, false), (false, true), (true, true)].map(|(pack, line_by_line)| DataOptions {
            pack,
            line_by_line,
            train_on_prompt: pack != line_by_line,
            ..options(seq_len)
        })
    })
}

/// Lines that are records in every form, with blanks of several kinds between them.
const RECORDS: &str = "\u{feff}{\"text\":\"hello the\\n\\nend\"}\r\n\r\n \u{a0}\u{2003}\n\
    {\"prompt\":\"hell 日本\",\"completion\":\"it's\u{1F600}\"}\n{\"text\":\"\"}\n\
    {\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"hello the hello\"}]}\n\n\
    {\"messages\":[{\"role\":\"user\",\"content\":\"only asked, never answered\"}]}\r\n\
    {\"input_ids\":[1,2,3,4,5,6,7,8,9],\"labels\":[-100,-100,-100,-100,5,6,7,8,9]}\n\
    {\"input_ids\":[],\"labels\":[]}\n{\"prompt\":\"hello the end, it's long\",\"completion\":\"x\"}\n\
    {\"text\":\"<|endoftext|>a\"}";

#[test]
fn text_gives_the_rows_of_the_twin() {
    let tokenizer = tokenizer();
    let texts = [
        "a",
        "\n",
        "\u{feff}\n",
        " \n\n",
        "\u{feff}",
        "",
        "hello the\r\n\r\nend\r",
        "hello\n\n \u{2003}\n日本 \u{1F600}\n<|endoftext|>\n\nthe end\n",
    ];
    for options in all_options() {
        texts.iter().for_each(|text| same(text.as_bytes(), Kind::Text, Some(&tokenizer), &options));
    }
}

#[test]
fn long_text_gives_the_rows_of_the_twin() {
    let tokenizer = tokenizer();
    // Cuts at 4 KiB; a stretch of 150 kB without a place for one; ends inside a piece.
    let lines = "hello the\n\n end 日本\u{1F600}\r\n<|endoftext|>\n \n \nit's\n".repeat(4000);
    let flat = "hello the end ".repeat(11_000);
    let folder = tempfile::tempdir().unwrap();
    for (pack, spool) in [(true, None), (false, Some(folder.path().to_owned()))] {
        let options = DataOptions { pack, spool, ..options(100) };
        same(format!("{lines}{flat}{lines}").as_bytes(), Kind::Text, Some(&tokenizer), &options);
        let by_line = DataOptions { line_by_line: true, ..options };
        same(format!("{lines}{flat}\n{lines}x").as_bytes(), Kind::Text, Some(&tokenizer), &by_line);
    }
}

#[test]
fn records_give_the_rows_of_the_twin() {
    let tokenizer = tokenizer();
    let folder = tempfile::tempdir().unwrap();
    let many = RECORDS.trim_start_matches('\u{feff}').to_owned() + "\n";
    for options in all_options() {
        same(RECORDS.as_bytes(), Kind::Jsonl, Some(&tokenizer), &options);
        same(many.repeat(20).as_bytes(), Kind::Jsonl, Some(&tokenizer), &options);
    }
    let spooled = DataOptions { spool: Some(folder.path().to_owned()), ..options(50) };
    same(many.repeat(1500).as_bytes(), Kind::Jsonl, Some(&tokenizer), &spooled);
    let mut reader = Reader::new(Some(&tokenizer), &spooled);
    reader.read("d", many.repeat(1500).as_bytes(), Kind::Jsonl).unwrap();
    let (heap, mapped) = reader.finish("d").unwrap().memory();
    assert!(heap == 0 && mapped > 1 << 20, "{heap} {mapped}: the rows were in a file");
}

#[test]
fn the_error_is_that_of_the_twin_whatever_the_parts() {
    let tokenizer = tokenizer();
    let fine = "{\"input_ids\":[1,2],\"labels\":[1,2]}\n".repeat(30);
    let text = "{\"text\":\"a\"}\n";
    let (broken, odd) = ("{\"text\"\n", "{\"txt\":1}\n");
    let files = [
        format!("{fine}{broken}{fine}{odd}{fine}"),
        format!("{fine}{odd}{fine}{broken}"),
        // Without a tokenizer line 1 cannot be tokenised; a line that is no record goes before it.
        format!("{text}{fine}{text}{broken}{fine}"),
        format!("{fine}{text}{fine}{text}"),
        text.to_owned(),
        format!("\n\n{text}"),
        "a line\n".to_owned(),
        "\n\na line\n\n".to_owned(),
        "a line\n\nanother\n".to_owned(),
        "{\"prompt\":\"abcdefghij\",\"completion\":\"\"}\n{\"text\":\"\"}\n".to_owned(),
        "{\"input_ids\":[1],\"labels\":[1]}\n".repeat(9),
    ];
    for file in &files {
        for tail in [&b""[..], b"\n\xff\n", b"\xe6\x97"] {
            let bytes = [file.as_bytes(), tail].concat();
            for tokenizer in [None, Some(&tokenizer)] {
                for line_by_line in [false, true] {
                    let options = DataOptions { line_by_line, ..options(4) };
                    same(&bytes, Kind::Jsonl, tokenizer, &options);
                    same(&bytes, Kind::Text, tokenizer, &options);
                }
            }
        }
    }
    let error = parts(files[2].as_bytes(), Kind::Jsonl, None, &options(4), 64, 3).unwrap_err();
    assert!(error.starts_with("d:33: is not JSON"), "{error}");
}

#[test]
fn a_tokenizer_that_cannot_be_cut_reads_the_whole() {
    let mut json: serde_json::Value = serde_json::from_slice(crate::data::testing::FIXTURE).unwrap();
    json["normalizer"] = serde_json::json!({"type": "NFC"});
    let whole = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let text = "e\u{301}\n\nhello the\n".repeat(5000);
    same(text.as_bytes(), Kind::Text, Some(&whole), &options(64));
}
