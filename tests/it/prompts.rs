//! Prompts from files and conversations, labels of several outputs, and `engraft-infer chat`.

use std::fs;

use serde_json::Value;

use crate::cli_support::Sandbox;

fn ids_of(events: &[Value]) -> Vec<Value> {
    events.iter().map(|event| event["token_ids"].clone()).collect()
}

const GREEDY: &str = "--max-new-tokens 6 --temperature 0";

#[test]
fn prompts_come_from_whole_files_records_and_conversations() {
    let sandbox = Sandbox::new();
    let infer = |words: &str| sandbox.infer(&format!("generate {GREEDY} --json {words}")).succeeds().events();
    // A whole file is one prompt, with its line breaks.
    sandbox.write("two.txt", "one\n\ntwo");
    let whole = infer("--prompt-whole two.txt");
    assert_eq!((whole.len(), &whole[0]["prompt"]), (1, &Value::from("one\n\ntwo")));
    assert_eq!(infer("--prompt-file two.txt").len(), 2);
    // Records of JSON.
    sandbox.write(
        "p.jsonl",
        "{\"prompt\": \"one\\n\\ntwo\", \"id\": 7}\n\n{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n\
         {\"input_ids\": [1, 2]}\n",
    );
    let records = infer("--prompt-file p.jsonl");
    assert_eq!((records.len(), &records[0]["token_ids"]), (3, &whole[0]["token_ids"]));
    assert_eq!(records[2]["prompt"], serde_json::json!([1, 2]));
    // A conversation is the template of training.
    sandbox.write(
        "chat.json",
        "[{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", \"content\": \"Hi\"}]",
    );
    sandbox.write("template.txt", "system:\nS\n\nuser:\nHi\n\nassistant:\n");
    let chat = infer("--messages chat.json");
    assert_eq!(ids_of(&chat), ids_of(&infer("--prompt-whole template.txt")));
    assert_eq!(chat[0]["prompt"][1]["content"], "Hi");
    let given = fs::read_to_string(sandbox.path("chat.json")).unwrap();
    let piped = sandbox.infer_with(&format!("generate {GREEDY} --json --messages -"), &given).succeeds();
    assert_eq!(ids_of(&piped.events()), ids_of(&chat));
}

#[test]
fn prompts_that_are_none_are_named() {
    let sandbox = Sandbox::new();
    sandbox.write("bad.jsonl", "{\"prompt\": \"a\"}\n{\"prmpt\": \"a\"}\n");
    sandbox.write("bad.json", "[{\"role\": \"robot\", \"content\": \"a\"}]");
    for (line, parts) in [
        ("--prompt-file bad.jsonl", &["bad.jsonl:2: has no prompt", "{\"messages\"}"][..]),
        ("--messages bad.json", &["bad.json: message 1 has the role \"robot\"", "system, user"]),
        ("--messages missing.json", &["missing.json", "check the path"]),
        ("--prompt-whole missing.txt", &["missing.txt", "check the path"]),
        ("--prompt x --messages bad.json", &["--messages"]),
    ] {
        sandbox.infer(&format!("generate {line}")).refused(parts);
    }
}

#[test]
fn several_outputs_are_labelled_and_one_is_not() {
    let sandbox = Sandbox::new();
    sandbox.write("p.txt", "name: Quiet Meadow; kind: noodle bar ->\nsecond\n");
    let run = |words: &str| sandbox.infer(&format!("generate {GREEDY} {words}")).succeeds().stdout();
    let single = run("--prompt second");
    assert!(!single.contains("---"), "{single}");
    let two = run("--prompt-file p.txt");
    let titles: Vec<&str> = two.lines().filter(|line| line.starts_with("---")).collect();
    let first = "--- prompt 1 of 2: name: Quiet Meadow; kind: noodle bar ->";
    assert_eq!(titles, [first, "--- prompt 2 of 2: second"]);
    assert!(two.starts_with(first) && two.contains("\n\n--- prompt 2 of 2"), "{two}");
    assert!(two.ends_with(&format!("--- prompt 2 of 2: second\n{single}")), "{two}");
    for micro_batch in [1, 3] {
        let three = run(&format!("--prompt second --num-samples 3 --micro-batch {micro_batch}"));
        let wanted: Vec<String> =
            (1..4).map(|number| format!("--- sample {number} of 3: second\n{single}")).collect();
        assert_eq!(three, wanted.join("\n"));
    }
}

#[test]
fn a_chat_keeps_the_conversation_and_its_cache() {
    let sandbox = Sandbox::new();
    let typed = "Hi\nmore\\\nlines\n/save one.jsonl\n/save one.jsonl\n/nonsense\n/reset\nHi\n/save data.jsonl\n/exit\nnever\n";
    let chat = sandbox.infer_with(&format!("chat -v {GREEDY} --system S"), typed).succeeds();
    let (stdout, stderr) = (chat.stdout(), chat.stderr());
    // What the second answer was given is what `generate` makes of the same turns.
    let record: Value =
        serde_json::from_str(&fs::read_to_string(sandbox.path("one.jsonl")).unwrap()).unwrap();
    let turns = record["messages"].as_array().unwrap();
    let roles: Vec<&str> = turns.iter().map(|turn| turn["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(turns[3]["content"], "more\nlines");
    sandbox.write("turns.json", serde_json::to_string(&turns[..4]).unwrap());
    let again = sandbox.infer(&format!("generate {GREEDY} --json --messages turns.json")).succeeds().events();
    assert_eq!(again[0]["text"], turns[4]["content"]);
    // Three answers: the one after /reset is the first one again, and nothing follows /exit.
    let first = turns[2]["content"].as_str().unwrap();
    let second = turns[4]["content"].as_str().unwrap();
    assert_eq!(stdout, format!("{first}\n{second}\n{first}\n"));
    // The second turn reads what is new alone.
    let reused: Vec<&str> = stderr.lines().filter(|line| line.contains("were in the cache")).collect();
    assert!(reused[0].starts_with("0 of ") && !reused[1].starts_with("0 of "), "{stderr}");
    assert!(stderr.contains("/nonsense: there is no such command"), "{stderr}");
    assert!(stderr.contains("/save data.jsonl: exists; give another name"), "{stderr}");
    // A record that was saved is training data, and a conversation to go on with.
    sandbox.engraft("train --data one.jsonl --steps 1 --output chatty --json").succeeds();
    sandbox.infer_with(&format!("chat {GREEDY} --messages one.jsonl --adapter chatty"), "Hi\n").succeeds();
}

#[test]
fn a_chat_that_is_too_long_forgets_its_oldest_turns() {
    let sandbox = Sandbox::new();
    // Far more than the positions of the embedded base.
    let typed = "abc ".repeat(60) + "\n";
    let chat = sandbox.infer_with("chat --max-new-tokens 4 --temperature 0", &typed.repeat(6)).succeeds();
    assert!(chat.stderr().contains("no longer fit"), "{}", chat.stderr());
    let endless = "abc ".repeat(3000) + "\n";
    let chat = sandbox.infer_with("chat --max-new-tokens 4 --temperature 0", &endless).succeeds();
    assert!(chat.stderr().contains("the message has no room"), "{}", chat.stderr());
}
