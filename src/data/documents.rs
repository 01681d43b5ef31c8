//! Records to documents: token ids and, for each position, the target it should predict.

use super::batch::NO_LOSS;
use super::options::DataOptions;
use super::records::{Record, Role};
use super::template::{self, Piece};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Inputs with their targets, already shifted.
///
/// A final end-of-text is the last target but no input, because nothing comes after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Token ids, `(t)`.
    pub ids: Vec<u32>,
    /// The token that position `i` should predict, or [`NO_LOSS`], `(t)`.
    pub targets: Vec<i32>,
    /// The first token, if virtual tokens in front of the document should predict it, or [`NO_LOSS`].
    pub first: i32,
    /// Inputs at the end of a record that was longer than a row, which no row has.
    pub lost: usize,
}

/// The tokenizer that text needs.
///
/// # Errors
/// [`Error::Input`] when there is none.
pub(super) fn needed(tokenizer: Option<&Tokenizer>) -> Result<&Tokenizer> {
    tokenizer.ok_or_else(|| {
        Error::input(
            "is text, and the base has no tokenizer; \
             give records {\"input_ids\",\"labels\"} or put tokenizer.json into the base's folder",
        )
    })
}

/// A stretch of tokens, all with loss or all without.
struct Span {
    ids: Vec<u32>,
    loss: bool,
}

impl Document {
    /// Tokenises `record`. A record that must stay in one row is cut to `options.seq_len` inputs; a long text is
    /// left whole and fills several rows.
    ///
    /// # Errors
    /// A record of text when there is no tokenizer, or text that it cannot encode.
    /// The message names no place, the caller does.
    pub fn new(record: &Record, tokenizer: Option<&Tokenizer>, options: &DataOptions) -> Result<Self> {
        if let Record::Ids { ids, labels } = record {
            return Ok(Self::from_ids(ids, labels, options.seq_len));
        }
        let mut document = Self::from_spans(spans(record, needed(tokenizer)?, options)?);
        if !matches!(record, Record::File(_) | Record::Text(_)) {
            document.cut(options.seq_len);
        }
        Ok(document)
    }

    /// As Transformers reads labels: position `i` predicts `labels[i + 1]` and the last position
    /// nothing, also where a record was cut to `seq_len` tokens. As in PEFT, virtual tokens predict `labels[0]`.
    fn from_ids(ids: &[u32], labels: &[i32], seq_len: usize) -> Self {
        let kept = ids.len().min(seq_len);
        let mut targets: Vec<i32> = labels[..kept].iter().skip(1).copied().collect();
        targets.resize(kept, NO_LOSS);
        let first = labels[..kept].first().copied().unwrap_or(NO_LOSS);
        Self { ids: ids[..kept].to_vec(), targets, first, lost: ids.len() - kept }
    }

    /// The first token of a document is a target of virtual tokens alone; every other token of a span with loss is
    /// one exactly once.
    fn from_spans(spans: Vec<Span>) -> Self {
        let length = spans.iter().map(|span| span.ids.len()).sum();
        let (ids, targets) = (Vec::with_capacity(length), Vec::with_capacity(length));
        let mut document = Self { ids, targets, first: NO_LOSS, lost: 0 };
        for span in spans {
            document.targets.extend(span.ids.iter().map(|&id| if span.loss { id as i32 } else { NO_LOSS }));
            document.ids.extend(span.ids);
        }
        if !document.ids.is_empty() {
            document.first = document.targets.remove(0);
            document.ids.pop();
        }
        document
    }

    fn cut(&mut self, seq_len: usize) {
        self.lost = self.ids.len().saturating_sub(seq_len);
        self.ids.truncate(seq_len);
        self.targets.truncate(seq_len);
    }
}

fn spans(record: &Record, tokenizer: &Tokenizer, options: &DataOptions) -> Result<Vec<Span>> {
    let end = Span { ids: vec![options.end_of_text], loss: true };
    let span = |text: &str, loss: bool| tokenizer.encode(text).map(|ids| Span { ids, loss });
    match record {
        Record::File(text) | Record::Text(text) => Ok(vec![span(text, true)?, end]),
        Record::Completion { prompt, completion } => {
            Ok(vec![span(prompt, options.train_on_prompt)?, span(completion, true)?, end])
        }
        Record::Messages(messages) => conversation(messages, tokenizer, options),
        Record::Ids { .. } => Ok(Vec::new()),
    }
}

/// A conversation in the [`template`]. The loss is on the assistant's contents and the end-of-text after each of them,
/// where generation is to stop.
fn conversation(
    messages: &[(Role, String)],
    tokenizer: &Tokenizer,
    options: &DataOptions,
) -> Result<Vec<Span>> {
    let pieces = template::pieces(messages.iter().map(|(role, content)| (role.name(), content.as_str())));
    // Turns after the last answer are without loss unless asked for, and end like any document.
    let is_open = matches!(pieces.last(), Some(Piece::Context(_)));
    let mut spans = Vec::new();
    for piece in pieces {
        let (text, loss) = match &piece {
            Piece::Context(text) => (text.as_str(), options.train_on_prompt),
            Piece::Answer(text) => (*text, true),
        };
        spans.push(Span { ids: tokenizer.encode(text)?, loss });
        if matches!(piece, Piece::Answer(_)) {
            spans.push(Span { ids: vec![options.end_of_text], loss });
        }
    }
    if is_open {
        spans.push(Span { ids: vec![options.end_of_text], loss: options.train_on_prompt });
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::{END, ids, options, tokenizer};

    fn document(record: &Record, options: &DataOptions) -> Document {
        Document::new(record, Some(&tokenizer()), options).unwrap()
    }

    fn completion(prompt: &str, completion: &str) -> Record {
        Record::Completion { prompt: prompt.into(), completion: completion.into() }
    }

    /// `text` and the end-of-text as targets.
    fn ended(text: &str) -> Vec<i32> {
        ids(text).into_iter().chain([END]).map(|id| id as i32).collect()
    }

    #[test]
    fn a_text_predicts_all_but_its_first_token_and_the_end() {
        let text = document(&Record::Text("hello the!".into()), &options(9));
        let targets = vec![261, 0, END as i32];
        assert_eq!(text, Document { ids: vec![259, 261, 0], targets, first: 259, lost: 0 });
        let one = document(&Record::File("!".into()), &options(9));
        assert_eq!(one, Document { ids: vec![0], targets: vec![END as i32], first: 0, lost: 0 });
        let none = document(&Record::Text(String::new()), &options(9));
        assert_eq!(none, Document { ids: vec![], targets: vec![], first: END as i32, lost: 0 });
    }

    #[test]
    fn prompt_and_completion_are_tokenised_apart() {
        // Together "hell" + "o" would be one token.
        let apart = document(&completion("hell", "o!"), &options(9));
        assert_eq!(apart.ids, [ids("hell"), ids("o!")].concat());
        assert_eq!(apart.targets, ended("o!"));
        let both = document(&completion("hell", "o!"), &DataOptions { train_on_prompt: true, ..options(9) });
        assert_eq!((apart.first, both.first), (NO_LOSS, ids("hell")[0] as i32));
        assert_eq!(Document { first: NO_LOSS, ..both }, apart, "only virtual tokens predict the first token");
        let longer = document(&completion("a b", "o"), &DataOptions { train_on_prompt: true, ..options(9) });
        assert_eq!(longer.targets, [ids(" b").iter().map(|&id| id as i32).collect(), ended("o")].concat());
    }

    #[test]
    fn an_empty_prompt_or_completion_is_allowed() {
        assert_eq!(document(&completion("", "ab"), &options(9)).targets, ended("b"));
        assert_eq!(document(&completion("ab", ""), &options(9)).targets, [NO_LOSS, END as i32]);
    }

    #[test]
    fn what_stays_in_a_row_is_cut_and_texts_are_not() {
        // Four inputs: three tokens, and the end-of-text as the target of the last.
        let exact = document(&completion("a", "bcd"), &options(4));
        assert!(exact.lost == 0 && exact.targets.last() == Some(&(END as i32)));
        let cut = document(&completion("a", "bcd"), &options(3));
        assert_eq!(cut.lost, 1);
        assert_eq!((cut.ids, cut.targets), (ids("abc"), ids("bcd").iter().map(|&id| id as i32).collect()));
        for text in [Record::File("abcdef".into()), Record::Text("abcdef".into())] {
            let whole = document(&text, &options(3));
            assert_eq!((whole.ids.len(), whole.lost), (6, 0));
        }
        let turns = Record::Messages(vec![(Role::User, "a".into()), (Role::Assistant, "bc".into())]);
        let (whole, part) = (document(&turns, &options(99)), document(&turns, &options(5)));
        assert_eq!((part.ids.len(), part.lost), (5, whole.ids.len() - 5));
    }

    #[test]
    fn ids_are_shifted_as_transformers_does() {
        let record = Record::Ids { ids: vec![4, 5, 6, 7], labels: vec![4, -100, 6, 9] };
        let whole = document(&record, &options(4));
        let targets = vec![-100, 6, 9, -100];
        assert_eq!(whole, Document { ids: vec![4, 5, 6, 7], targets, first: 4, lost: 0 });
        let cut = document(&record, &options(3));
        assert_eq!(cut, Document { ids: vec![4, 5, 6], targets: vec![-100, 6, -100], first: 4, lost: 1 });
        // A label says what is predicted, whatever the id is.
        let other = document(&Record::Ids { ids: vec![4, 5], labels: vec![-100, 5] }, &options(3));
        assert_eq!(other.first, NO_LOSS);
        let empty = document(&Record::Ids { ids: vec![], labels: vec![] }, &options(3));
        assert!(empty.ids.is_empty() && empty.targets.is_empty());
    }

    #[test]
    fn one_answer_is_a_prompt_and_its_completion() {
        let messages = Record::Messages(vec![
            (Role::System, "Be brief.".into()),
            (Role::User, "Hi".into()),
            (Role::Assistant, "hello".into()),
        ]);
        let plain = completion("system:\nBe brief.\n\nuser:\nHi\n\nassistant:\n", "hello");
        assert_eq!(document(&messages, &options(99)), document(&plain, &options(99)));
    }

    #[test]
    fn every_answer_is_supervised_and_nothing_else() {
        let turns = [(Role::User, "a"), (Role::Assistant, "b"), (Role::User, "c"), (Role::Assistant, "d")];
        let messages = turns.map(|(role, content)| (role, content.to_owned())).to_vec();
        let two = document(&Record::Messages(messages.clone()), &options(99));
        let spoken: Vec<i32> = two.targets.iter().copied().filter(|&target| target != NO_LOSS).collect();
        assert_eq!(spoken, [ended("b"), ended("d")].concat());
        let text = "user:\na\n\nassistant:\nb<|endoftext|>user:\nc\n\nassistant:\nd";
        assert_eq!(two.ids, ids(text));
        let open = document(&Record::Messages(messages[..3].to_vec()), &options(99));
        let spoken: Vec<i32> = open.targets.iter().copied().filter(|&target| target != NO_LOSS).collect();
        assert_eq!(spoken, ended("b"));
        let all = DataOptions { train_on_prompt: true, ..options(99) };
        let trained = document(&Record::Messages(messages[..3].to_vec()), &all);
        assert!(trained.targets.iter().all(|&target| target != NO_LOSS));
    }

    #[test]
    fn text_needs_a_tokenizer_and_ids_do_not() {
        let ids = Record::Ids { ids: vec![1, 2], labels: vec![1, 2] };
        assert!(Document::new(&ids, None, &options(4)).is_ok());
        let error = Document::new(&Record::Text("a".into()), None, &options(4)).unwrap_err().to_string();
        assert!(error.starts_with("is text, and the base has no tokenizer; "), "{error}");
    }
}
