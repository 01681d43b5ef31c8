//! Tests of the record forms, from raw records on.

use super::*;
use crate::data::{formats::Kind, records::Parser, split};

/// The records of a file of `kind` with their lines, and the keys that were not read.
fn records(kind: Kind, text: &str, keys: &Keys) -> Result<Vec<(usize, Parsed)>> {
    let mut parser = Parser::new(kind, keys, 100);
    let mut found = Vec::new();
    for raw in split::splitter(kind).split(text, true, usize::MAX).raw {
        let place = SourceLine { name: "d.jsonl", line: Some(raw.line) };
        match parser.wants_columns() {
            true => parser.take_columns(place, raw.text)?,
            false => found.push((raw.line, parser.parse(place, raw.text)?)),
        }
    }
    Ok(found)
}

fn jsonl(text: &str) -> Result<Vec<(usize, Record)>> {
    let found = records(Kind::Jsonl, text, &Keys::default())?;
    Ok(found.into_iter().map(|(line, parsed)| (line, parsed.record)).collect())
}

fn refused(line: &str) -> String {
    let error = jsonl(&format!("{{\"text\":\"fine\"}}\n{line}\n")).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let message = error.to_string();
    message.strip_prefix("d.jsonl:2: ").unwrap_or_else(|| panic!("no place in {message}")).to_owned()
}

#[test]
fn every_form_is_read_with_its_line() {
    let text = "{\"text\":\"a\"}\n\n{\"completion\":\"c\",\"prompt\":\"p\"}\r\n\
        {\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"content\":\"u\",\"role\":\"user\"},\
        {\"role\":\"assistant\",\"content\":\"\"}]}\n{\"input_ids\":[0,99],\"labels\":[-100,99]}";
    let expected = [
        (1, Record::Text("a".into())),
        (3, Record::Completion { prompt: "p".into(), completion: "c".into() }),
        (
            4,
            Record::Messages(vec![
                (Role::System, "s".into()),
                (Role::User, "u".into()),
                (Role::Assistant, String::new()),
            ]),
        ),
        (5, Record::Ids { ids: vec![0, 99], labels: vec![-100, 99] }),
    ];
    assert_eq!(jsonl(text).unwrap(), expected);
}

#[test]
fn broken_json_and_other_values_are_refused() {
    let broken = refused("{\"text\":\"a\"");
    assert!(broken.starts_with("is not JSON (EOF while parsing an object at column 11)"), "{broken}");
    assert_eq!(refused("[1]"), "is an array; give one object a line");
    assert_eq!(refused("3"), "is a number; give one object a line");
}

#[test]
fn other_sets_of_keys_are_refused() {
    for line in ["{}", "{\"txt\":\"a\"}", "{\"prompt\":\"a\"}", "{\"input_ids\":[1]}"] {
        assert!(refused(line).contains("; a record is {\"text\"}, "), "{line}");
    }
    let many = refused("{\"a\":1,\"b\":2,\"c\":3,\"d\":4,\"e\":5}");
    assert!(many.starts_with("has the keys \"a\", \"b\", \"c\" and 2 more; a record is "), "{many}");
    assert!(refused("{}").starts_with("has no keys; "));
}

#[test]
fn wrong_types_are_refused() {
    assert_eq!(refused("{\"text\":1}"), "\"text\" is a number; it must be a string");
    assert_eq!(
        refused("{\"prompt\":\"a\",\"completion\":null}"),
        "\"completion\" is null; it must be a string"
    );
    assert_eq!(refused("{\"messages\":{}}"), "\"messages\" is an object; it must be an array");
    assert_eq!(
        refused("{\"input_ids\":true,\"labels\":[]}"),
        "\"input_ids\" is a boolean; it must be an array"
    );
    let float = refused("{\"input_ids\":[1,1.5],\"labels\":[1,1]}");
    assert_eq!(float, "\"input_ids\"[1] is 1.5; give a token id");
    let label = refused("{\"input_ids\":[1],\"labels\":[\"a\"]}");
    assert_eq!(label, "\"labels\"[0] is \"a\"; give a token id, or -100 for no loss");
}

#[test]
fn messages_need_a_role_and_a_content() {
    assert!(refused("{\"messages\":[]}").starts_with("\"messages\" is empty"));
    for item in ["3", "{\"role\":\"user\"}", "{\"content\":\"a\"}", "{\"role\":1,\"content\":\"a\"}"] {
        let line = format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\"}},{item}]}}");
        assert!(refused(&line).starts_with("message 2 has no role and content; "), "{item}");
    }
    let role = refused("{\"messages\":[{\"role\":\"narrator\",\"content\":\"a\"}]}");
    assert_eq!(role, "message 1 has the role \"narrator\"; use system, user, assistant or tool");
    let calls = refused("{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]}]}");
    assert!(calls.starts_with("the content of message 1 is null; give a string, or parts "), "{calls}");
    let image = refused("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}");
    assert!(image.starts_with("message 1 has a part of type \"image_url\" without a text"), "{image}");
}

#[test]
fn ids_and_labels_are_as_long_and_inside_the_vocabulary() {
    let length = refused("{\"input_ids\":[1,2],\"labels\":[1]}");
    assert_eq!(length, "\"labels\" has 1 entries and \"input_ids\" 2; give one label for each token");
    let outside = refused("{\"input_ids\":[100],\"labels\":[1]}");
    assert_eq!(outside, "\"input_ids\"[0] is 100, outside the base's vocabulary; give ids from 0 to 99");
    assert!(refused("{\"input_ids\":[-100],\"labels\":[1]}").starts_with("\"input_ids\"[0] is -100"));
    for label in [-1, -101, 100, i64::MAX] {
        let line = format!("{{\"input_ids\":[1],\"labels\":[{label}]}}");
        assert!(refused(&line).starts_with(&format!("\"labels\"[0] is {label}, outside")), "{label}");
    }
}

/// The only record of `line`, and the keys that were not read.
fn one(line: &str, keys: &Keys) -> (Record, Vec<String>) {
    let parsed = records(Kind::Jsonl, line, keys).unwrap().remove(0).1;
    (parsed.record, parsed.ignored)
}

fn pair_of(prompt: &str, completion: &str) -> Record {
    Record::Completion { prompt: prompt.into(), completion: completion.into() }
}

#[test]
fn pairs_have_several_names() {
    for (line, form) in [
        ("{\"prompt\":\"p\",\"completion\":\"c\"}", "prompt, completion"),
        ("{\"response\":\"c\",\"prompt\":\"p\"}", "prompt, response"),
        ("{\"question\":\"p\",\"answer\":\"c\"}", "question, answer"),
    ] {
        let parsed = records(Kind::Jsonl, line, &Keys::default()).unwrap().remove(0).1;
        assert_eq!((parsed.record, &parsed.form[..], parsed.ignored), (pair_of("p", "c"), form, vec![]));
    }
}

#[test]
fn an_instruction_is_put_into_the_template_of_alpaca() {
    let alone = "Below is an instruction that describes a task. Write a response that appropriately completes the \
                 request.\n\n### Instruction:\nAdd {input}.\n\n### Response:\n";
    for line in [
        "{\"instruction\":\"Add {input}.\",\"input\":\"\",\"output\":\"5\"}",
        "{\"instruction\":\"Add {input}.\",\"input\":null,\"output\":\"5\"}",
        "{\"instruction\":\"Add {input}.\",\"output\":\"5\"}",
        "{\"instruction\":\"Add {input}.\",\"response\":\"5\"}",
    ] {
        assert_eq!(one(line, &Keys::default()), (pair_of(alone, "5"), vec![]), "{line}");
    }
    let with = "Below is an instruction that describes a task, paired with an input that provides further context. \
                Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### \
                Input:\n2 3\n\n### Response:\n";
    for line in [
        "{\"instruction\":\"Add.\",\"input\":\"2 3\",\"output\":\"5\"}",
        "{\"instruction\":\"Add.\",\"context\":\"2 3\",\"response\":\"5\"}",
    ] {
        assert_eq!(one(line, &Keys::default()), (pair_of(with, "5"), vec![]), "{line}");
    }
}

#[test]
fn chats_are_read_as_openai_and_sharegpt_write_them() {
    let expected = Record::Messages(vec![
        (Role::System, "s".into()),
        (Role::User, "u v".into()),
        (Role::Tool, "t".into()),
        (Role::Assistant, "a".into()),
    ]);
    let messages = "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"name\":\"x\",\"content\":\
        [{\"type\":\"text\",\"text\":\"u \"},{\"type\":\"text\",\"text\":\"v\"}]},\
        {\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"t\"},{\"role\":\"assistant\",\"content\":\"a\"}],\"id\":3}";
    let (record, ignored) = one(messages, &Keys::default());
    assert_eq!(
        (record, ignored),
        (expected.clone(), ["id", "messages[].name", "messages[].tool_call_id"].map(String::from).to_vec())
    );
    let sharegpt = "{\"conversations\":[{\"from\":\"system\",\"value\":\"s\"},{\"from\":\"human\",\"value\":\"u v\"},\
        {\"from\":\"observation\",\"value\":\"t\"},{\"from\":\"gpt\",\"value\":\"a\"}]}";
    assert_eq!(one(sharegpt, &Keys::default()), (expected, vec![]));
}

#[test]
fn the_first_form_in_the_table_wins_and_other_keys_are_told() {
    let (record, ignored) =
        one("{\"text\":\"t\",\"prompt\":\"p\",\"completion\":\"c\",\"id\":1}", &Keys::default());
    assert_eq!((record, ignored), (pair_of("p", "c"), vec!["id".to_owned(), "text".to_owned()]));
    let (record, ignored) = one("{\"text\":\"t\",\"prompt\":\"p\"}", &Keys::default());
    assert_eq!((record, ignored), (Record::Text("t".into()), vec!["prompt".to_owned()]));
}

#[test]
fn keys_that_the_user_names_go_before_every_form() {
    let keys = |prompt: &str, completion: &str, text: &str| {
        let given = |name: &str| Some(name.to_owned()).filter(|name| !name.is_empty());
        Keys { prompt: given(prompt), completion: given(completion), text: given(text) }
    };
    let line = "{\"text\":\"t\",\"q\":\"p\",\"a\":\"c\",\"completion\":\"d\"}";
    assert_eq!(one(line, &keys("q", "a", "")).0, pair_of("p", "c"));
    assert_eq!(one(line, &keys("q", "", "")).0, pair_of("p", "d"));
    assert_eq!(one(line, &keys("", "", "q")).0, Record::Text("p".into()));
    let error = |keys: &Keys| records(Kind::Jsonl, line, keys).err().unwrap().to_string();
    assert_eq!(
        error(&keys("x", "a", "")),
        "d.jsonl:1: has no \"x\" among its keys \"a\", \"completion\", \"q\" and 1 more; --prompt-key must name one of \
         its keys"
    );
    let half = error(&keys("", "a", ""));
    assert!(
        half.contains("has no \"prompt\"") && half.contains("both --prompt-key and --completion-key"),
        "{half}"
    );
}

#[test]
fn a_key_that_comes_twice_is_refused() {
    assert_eq!(refused("{\"text\":\"a\",\"text\":\"b\"}"), "has the key \"text\" twice; keep one of them");
    let inner = refused("{\"messages\":[{\"role\":\"user\",\"role\":\"user\",\"content\":\"\"}]}");
    assert_eq!(inner, "has the key \"role\" twice; keep one of them");
}

#[test]
fn tables_and_arrays_give_the_records_of_their_lines() {
    let columns = |text: &str| records(Kind::Csv, text, &Keys::default());
    let found = columns("answer,question,id\n c,\"p, \"\"q\"\"\n\",7\n\nd,e,8\n").unwrap();
    let found: Vec<_> =
        found.into_iter().map(|(line, parsed)| (line, parsed.record, parsed.ignored)).collect();
    let id = || vec!["id".to_owned()];
    assert_eq!(found, [(2, pair_of("p, \"q\"\n", " c"), id()), (5, pair_of("e", "d"), id())]);
    let error = |text: &str| columns(text).err().unwrap().to_string();
    assert!(error("text,text\na,b\n").contains(":1: names the column \"text\" twice"));
    assert!(error("text,id\na\n").contains(":2: has 1 fields for 2 columns"));
    assert!(error("a,b\n1,2\n").contains(":2: has the columns \"a\", \"b\"; a record is "));
    let array = records(Kind::Json, "[{\"text\":\n\"a\"},\n{\"text\":\"b\"}]", &Keys::default()).unwrap();
    let array: Vec<_> = array.into_iter().map(|(line, parsed)| (line, parsed.record)).collect();
    assert_eq!(array, [(1, Record::Text("a".into())), (3, Record::Text("b".into()))]);
    let error = records(Kind::Json, "[{\"text\":\n nope}]", &Keys::default()).err().unwrap().to_string();
    assert!(error.starts_with("d.jsonl:2: is not JSON (expected "), "{error}");
}
