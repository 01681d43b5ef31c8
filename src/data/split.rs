//! Splits the text of a file into raw records, a bounded number at a time: lines, JSON values, lines of CSV.

use super::formats::Kind;

/// A record as its file has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Raw<'t> {
    /// Line of the file where it begins, from 1.
    pub line: usize,
    pub text: &'t str,
}

/// What a splitter found at the beginning of a text.
#[derive(Debug, Default)]
pub(super) struct Part<'t> {
    /// Records that are complete in the text.
    pub raw: Vec<Raw<'t>>,
    /// Bytes of the text that need not be looked at again.
    pub used: usize,
    /// Why the file cannot be split from here on: line and message.
    pub fault: Option<(usize, String)>,
}

impl Part<'_> {
    /// Whether more text is needed before there is anything to do.
    pub(super) fn is_empty(&self) -> bool {
        self.raw.is_empty() && self.fault.is_none()
    }
}

/// The way of a format to tell records apart.
pub(super) trait Split {
    /// Up to `most` records from the beginning of `text`, which goes on where the last call's `used` ended. Unless the
    /// file has `ended`, a record at the end of the text may be incomplete and waits for more.
    fn split<'t>(&mut self, text: &'t str, ended: bool, most: usize) -> Part<'t>;
}

/// The splitter of a format.
pub(super) fn splitter(kind: Kind) -> Box<dyn Split> {
    match kind {
        Kind::Text | Kind::Jsonl | Kind::Parquet => Box::new(Lines { line: 1 }),
        Kind::Json => Box::new(JsonValues { line: 1, state: State::Start }),
        Kind::Csv => Box::new(CsvRecords { line: 1, delimiter: b',' }),
        Kind::Tsv => Box::new(CsvRecords { line: 1, delimiter: b'\t' }),
    }
}

fn newlines(text: &str) -> usize {
    text.bytes().filter(|&byte| byte == b'\n').count()
}

/// Each line that is not blank, without its line break.
struct Lines {
    /// Number of the next line.
    line: usize,
}

impl Split for Lines {
    fn split<'t>(&mut self, text: &'t str, ended: bool, most: usize) -> Part<'t> {
        let mut part = Part::default();
        while part.raw.len() < most {
            let rest = &text[part.used..];
            let (line, used) = match rest.find('\n') {
                Some(end) => {
                    let line = &rest[..end];
                    (line.strip_suffix('\r').unwrap_or(line), end + 1)
                }
                None if ended && !rest.is_empty() => (rest, rest.len()),
                None => break,
            };
            if !line.trim().is_empty() {
                part.raw.push(Raw { line: self.line, text: line });
            }
            self.line += 1;
            part.used += used;
        }
        part
    }
}

/// The elements of one array, or values one after the other.
struct JsonValues {
    line: usize,
    state: State,
}

/// Where in a JSON file the splitter is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first character that is no space.
    Start,
    /// After `[`.
    First,
    /// After a comma of the array.
    Element,
    /// After an element of the array.
    Separator,
    /// Between values without an array.
    Values,
    /// After `]`.
    End,
}

impl Split for JsonValues {
    fn split<'t>(&mut self, text: &'t str, ended: bool, most: usize) -> Part<'t> {
        let mut part = Part::default();
        let bytes = text.as_bytes();
        loop {
            while let Some(byte) = bytes.get(part.used).filter(|byte| byte.is_ascii_whitespace()) {
                self.line += usize::from(*byte == b'\n');
                part.used += 1;
            }
            let Some(&byte) = bytes.get(part.used) else {
                if ended && matches!(self.state, State::First | State::Element | State::Separator) {
                    part.fault =
                        Some((self.line, "ends inside its array; check that the file is whole".into()));
                }
                return part;
            };
            if part.raw.len() == most {
                return part;
            }
            match (self.state, byte) {
                (State::Start, b'[') => (self.state, part.used) = (State::First, part.used + 1),
                (State::Start, _) => self.state = State::Values,
                (State::Separator, b',') => (self.state, part.used) = (State::Element, part.used + 1),
                (State::Separator | State::First, b']') => {
                    (self.state, part.used) = (State::End, part.used + 1);
                }
                (State::Separator, _) => {
                    let message =
                        "is no JSON: a comma or ] must follow an element of the array; correct the file";
                    part.fault = Some((self.line, message.into()));
                    return part;
                }
                (State::End, _) => {
                    let message = "has more after its array; give one array, or objects one after the other";
                    part.fault = Some((self.line, message.into()));
                    return part;
                }
                (State::First | State::Element | State::Values, _) => {
                    let Some(len) = value_len(&bytes[part.used..], ended) else { return part };
                    let value = &text[part.used..part.used + len];
                    part.raw.push(Raw { line: self.line, text: value });
                    self.line += newlines(value);
                    part.used += len;
                    if self.state != State::Values {
                        self.state = State::Separator;
                    }
                }
            }
        }
    }
}

/// Bytes of the value at the beginning of `bytes`, which are not empty; `None` if its end is not there yet. A value
/// that the end of the file cuts goes that far, and is refused when it is parsed.
fn value_len(bytes: &[u8], ended: bool) -> Option<usize> {
    let delimits = |byte: &u8| byte.is_ascii_whitespace() || b",]}[{\"".contains(byte);
    let len = match bytes[0] {
        b'{' | b'[' => bracketed_len(bytes),
        b'"' => string_len(bytes),
        // A number, a word or no JSON at all; at least a byte, so that every call gets on.
        _ => bytes.iter().skip(1).position(delimits).map(|others| 1 + others),
    };
    len.or(ended.then_some(bytes.len()))
}

/// Bytes of the array or object at the beginning of `bytes`.
fn bracketed_len(bytes: &[u8]) -> Option<usize> {
    let (mut depth, mut at) = (0usize, 0);
    loop {
        match bytes.get(at)? {
            b'"' => {
                at += string_len(&bytes[at..])?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Bytes of the string that begins with a quote; `None` if it does not end in `bytes`.
fn string_len(bytes: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        match bytes.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Records of RFC 4180, the first of which names the columns: a line, or more where a quoted field holds line breaks.
struct CsvRecords {
    line: usize,
    delimiter: u8,
}

impl Split for CsvRecords {
    fn split<'t>(&mut self, text: &'t str, ended: bool, most: usize) -> Part<'t> {
        let mut part = Part::default();
        while part.raw.len() < most && part.used < text.len() {
            let rest = &text[part.used..];
            let (len, is_whole) = record_len(rest.as_bytes(), self.delimiter);
            if !is_whole && !ended {
                break;
            }
            if len == 0 {
                let message = "has a quoted field that never ends; write a quote inside a quoted field twice";
                part.fault = Some((self.line, message.into()));
                break;
            }
            let record = rest[..len].strip_suffix('\n').unwrap_or(&rest[..len]);
            let record = record.strip_suffix('\r').unwrap_or(record);
            if !record.trim().is_empty() {
                part.raw.push(Raw { line: self.line, text: record });
            }
            self.line += newlines(&rest[..len]);
            part.used += len;
        }
        part
    }
}

/// Bytes of the record at the beginning of `bytes` with its line break, and whether the break is there; 0 bytes if a
/// quoted field goes on to the end.
fn record_len(bytes: &[u8], delimiter: u8) -> (usize, bool) {
    let (mut at, mut begins_field) = (0, true);
    while let Some(&byte) = bytes.get(at) {
        if byte == b'"' && begins_field {
            match quoted_len(&bytes[at..]) {
                Some(len) => at += len,
                None => return (0, false),
            }
            begins_field = false;
            continue;
        }
        at += 1;
        if byte == b'\n' {
            return (at, true);
        }
        begins_field = byte == delimiter;
    }
    (at, false)
}

/// Bytes of the quoted field at the beginning of `bytes` up to its closing quote; two quotes stand for one.
fn quoted_len(bytes: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        match (bytes.get(at)?, bytes.get(at + 1)) {
            (b'"', Some(b'"')) => at += 2,
            (b'"', _) => return Some(at + 1),
            _ => at += 1,
        }
    }
}

/// The fields of a record of `kind`, CSV or TSV.
pub(super) fn fields(record: &str, kind: Kind) -> Vec<String> {
    let delimiter = if kind == Kind::Tsv { b'\t' } else { b',' };
    let break_only = csv_core::Terminator::Any(b'\n');
    // Built anew: the clone of a reader has no automaton.
    let mut reader = csv_core::ReaderBuilder::new().delimiter(delimiter).terminator(break_only).build();
    let (mut output, mut ends) = (vec![0; record.len() + 1], vec![0; 16]);
    let (mut input, mut written, mut count) = (record.as_bytes(), 0, 0);
    loop {
        let (result, read, wrote, ended) =
            reader.read_record(input, &mut output[written..], &mut ends[count..]);
        (input, written, count) = (&input[read..], written + wrote, count + ended);
        match result {
            // Asked again with nothing, it ends the record.
            csv_core::ReadRecordResult::InputEmpty => {}
            csv_core::ReadRecordResult::OutputFull => output.resize(2 * output.len(), 0),
            csv_core::ReadRecordResult::OutputEndsFull => ends.resize(2 * ends.len(), 0),
            csv_core::ReadRecordResult::Record | csv_core::ReadRecordResult::End => break,
        }
    }
    let mut begin = 0;
    let field = |&end: &usize| {
        let field = String::from_utf8_lossy(&output[begin..end]).into_owned();
        begin = end;
        field
    };
    ends[..count].iter().map(field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = (Vec<(usize, String)>, Option<(usize, String)>);

    /// Everything in `text`, which becomes known `step` bytes at a time.
    fn all(kind: Kind, text: &str, step: usize, most: usize) -> Found {
        let mut splitter = splitter(kind);
        let (mut found, mut begin, mut end) = (Vec::new(), 0, 0);
        loop {
            let part = splitter.split(&text[begin..end], end == text.len(), most);
            found.extend(part.raw.iter().map(|raw| (raw.line, raw.text.to_owned())));
            begin += part.used;
            if part.fault.is_some() || (part.is_empty() && end == text.len()) {
                return (found, part.fault);
            }
            if part.is_empty() {
                end = (end + step).min(text.len());
                end = (end..).find(|&end| text.is_char_boundary(end)).unwrap();
            }
        }
    }

    #[track_caller]
    fn holds(kind: Kind, text: &str, expected: &[(usize, &str)], fault: Option<(usize, &str)>) {
        for (step, most) in [(1, 1), (2, 3), (7, 2), (1000, 1), (1000, 100)] {
            let (found, failed) = all(kind, text, step, most);
            let found: Vec<_> = found.iter().map(|(line, text)| (*line, &text[..])).collect();
            assert_eq!(found, expected, "step {step}, most {most}");
            match (failed, fault) {
                (None, None) => {}
                (Some((line, message)), Some((wanted, part))) => {
                    assert!(line == wanted && message.contains(part), "{line} {message}");
                }
                (failed, _) => panic!("{failed:?} for {fault:?}"),
            }
        }
    }

    #[test]
    fn lines_keep_their_numbers() {
        let text = "one\r\n\r\n  \n two\nlast\r";
        holds(Kind::Jsonl, text, &[(1, "one"), (4, " two"), (5, "last\r")], None);
        holds(Kind::Jsonl, "", &[], None);
    }

    #[test]
    fn an_array_gives_its_elements() {
        let text = " [\n {\"a\": \"]},\\\"é\\\\\"},\n{\n\"b\":[1,{}]}, 3,\"x\", tr]\n ";
        let expected =
            [(2, "{\"a\": \"]},\\\"é\\\\\"}"), (3, "{\n\"b\":[1,{}]}"), (4, "3"), (4, "\"x\""), (4, "tr")];
        holds(Kind::Json, text, &expected, None);
        holds(Kind::Json, "[]", &[], None);
    }

    #[test]
    fn values_one_after_the_other_are_records_too() {
        holds(
            Kind::Json,
            "{\"a\":1}\n\n{\"b\":\n2}{}",
            &[(1, "{\"a\":1}"), (3, "{\"b\":\n2}"), (4, "{}")],
            None,
        );
    }

    #[test]
    fn arrays_that_are_none_are_refused_where_they_break() {
        holds(Kind::Json, "[{},\n", &[(1, "{}")], Some((2, "ends inside its array")));
        holds(Kind::Json, "[{}\n{}]", &[(1, "{}")], Some((2, "a comma or ]")));
        holds(Kind::Json, "[{}]\n[{}]", &[(1, "{}")], Some((2, "more after its array")));
        // What is no JSON inside is left to the parser.
        holds(Kind::Json, "[{},]", &[(1, "{}"), (1, "]")], Some((1, "ends inside")));
        holds(Kind::Json, "[{\"a\": [1,", &[(1, "{\"a\": [1,")], Some((1, "ends inside")));
    }

    #[test]
    fn quoted_fields_hold_line_breaks() {
        let text = "text,id\r\n\"a \"\"b\"\"\r\nc\",1\r\n\n5\" disk,2\n\"x\",\"\"";
        let expected = [(1, "text,id"), (2, "\"a \"\"b\"\"\r\nc\",1"), (5, "5\" disk,2"), (6, "\"x\",\"\"")];
        holds(Kind::Csv, text, &expected, None);
        assert_eq!(fields(expected[1].1, Kind::Csv), ["a \"b\"\r\nc", "1"]);
        assert_eq!(fields(expected[2].1, Kind::Csv), ["5\" disk", "2"]);
        assert_eq!(fields("\"x\",\"\"", Kind::Csv), ["x", ""]);
        assert_eq!(fields("a\tb,c\t", Kind::Tsv), ["a", "b,c", ""]);
        let many = (0..99).map(|index| index.to_string()).collect::<Vec<_>>();
        assert_eq!(fields(&many.join(","), Kind::Csv), many);
    }

    #[test]
    fn a_quote_that_never_closes_is_found() {
        holds(Kind::Tsv, "a\tb\n1\t\"2\n3\t4\n", &[(1, "a\tb")], Some((2, "never ends")));
    }
}
