//! `engraft push` against a hub on a local port.

use std::fs;

use base64::{Engine, engine::general_purpose::STANDARD};

use crate::{
    cli_support::{Finished, Sandbox},
    push_server::{PushServer, Pushes, TOKEN},
};

fn hub() -> PushServer {
    let me = || ["me".to_owned()].into_iter().collect();
    PushServer::start(Pushes { may_create: me(), may_write: me(), ..Pushes::default() })
}

/// `engraft push` with the words of `line`, to `server`, with a token in HF_TOKEN unless it is empty.
fn push(sandbox: &Sandbox, server: &PushServer, token: &str, line: &str) -> Finished {
    let mut command = sandbox.command(&format!("push {line}"));
    command.env("HF_ENDPOINT", &server.endpoint).env("HF_HUB_OFFLINE", "0").env("HF_TOKEN", token);
    Finished(command.output().unwrap())
}

fn run() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 1").succeeds();
    sandbox
}

#[test]
fn an_adapter_becomes_a_repository_and_then_a_commit() {
    let (sandbox, server) = (run(), hub());
    sandbox.write("run/adapter/private.txt", "mine");
    let pushed = push(&sandbox, &server, TOKEN, "run me/poems --message First").succeeds();
    assert!(pushed.stdout().contains("new repository http://127.0.0.1"), "{}", pushed.stdout());
    assert!(pushed.stdout().contains("engraft-infer generate --adapter me/poems"), "{}", pushed.stdout());
    let oid = server.with(|hub| {
        assert_eq!(hub.repositories.get("me/poems"), Some(&false));
        let (id, lines) = &hub.commits[0];
        assert_eq!((id.as_str(), &lines[0]["value"]["summary"]), ("me/poems", &"First".into()));
        let paths: Vec<&str> =
            lines[1..].iter().map(|line| line["value"]["path"].as_str().unwrap()).collect();
        assert_eq!(paths, ["adapter_config.json", "adapter_model.safetensors", "README.md"]);
        let file = |name: &str| fs::read(sandbox.path("run/adapter").join(name)).unwrap();
        let content =
            |index: usize| STANDARD.decode(lines[index]["value"]["content"].as_str().unwrap()).unwrap();
        assert_eq!((content(1), content(3)), (file("adapter_config.json"), file("README.md")));
        let oid = lines[2]["value"]["oid"].as_str().unwrap().to_owned();
        assert_eq!(hub.large[&oid], file("adapter_model.safetensors"));
        oid
    });
    assert!(server.log().contains(&format!("PUT /store/{oid}")), "sent once");
    // Again: the repository exists, and the large file is not sent again.
    let again = push(&sandbox, &server, TOKEN, "run/adapter me/poems").succeeds();
    assert!(!again.stdout().contains("new repository"), "{}", again.stdout());
    assert!(!server.log().iter().any(|line| line.contains("/store/")));
    server.with(|hub| assert_eq!(hub.commits.len(), 2));
    push(&sandbox, &server, TOKEN, "run me/secret --private").succeeds();
    server.with(|hub| assert_eq!(hub.repositories.get("me/secret"), Some(&true)));
}

#[test]
fn refusals_say_what_to_do() {
    let (sandbox, server) = (run(), hub());
    push(&sandbox, &server, "", "run me/x").refused(&["me/x: there is no token to push with", "HF_TOKEN"]);
    assert_eq!(server.log(), [""; 0], "nothing was asked without a token");
    push(&sandbox, &server, "hf_wrong", "run me/x").refused(&["me/x: the hub refuses the token", "HF_TOKEN"]);
    push(&sandbox, &server, TOKEN, "run you/x").refused(&[
        "you/x: the token in use may not make the repository",
        "You don't have the rights",
        "name another owner",
    ]);
    // Made by somebody else, where this token may read alone.
    server.with(|hub| hub.repositories.insert("you/x".into(), false));
    push(&sandbox, &server, TOKEN, "run you/x").refused(&["you/x: the token in use may not take the files"]);
    // And one where it may write, but not make new ones.
    server.with(|hub| hub.may_write.insert("you".into()));
    push(&sandbox, &server, TOKEN, "run you/x").succeeds();
    for id in ["x", "a/b/c", "me/..", "me/"] {
        push(&sandbox, &server, TOKEN, &format!("run {id}")).refused(&[id, "give OWNER/NAME"]);
    }
    push(&sandbox, &server, TOKEN, "data.jsonl me/x").refused(&["data.jsonl"]);
    sandbox.engraft("push run me/x").refused(&["there is no token"]);
}

#[test]
fn a_cut_connection_is_tried_again_and_then_told() {
    let (sandbox, server) = (run(), hub());
    server.with(|hub| hub.cuts = 2);
    push(&sandbox, &server, TOKEN, "run me/poems").succeeds();
    server.with(|hub| {
        hub.cuts = 100;
        hub.large.clear();
        hub.commits.clear();
    });
    let cut = push(&sandbox, &server, TOKEN, "run me/poems");
    assert_eq!(cut.code(), Some(1), "{}", cut.stderr());
    assert!(
        cut.stderr().contains("the push was cut") && cut.stderr().contains("run the command again"),
        "{}",
        cut.stderr()
    );
    server.with(|hub| {
        assert!(hub.commits.is_empty(), "half a push is no commit");
        hub.cuts = 0;
    });
    push(&sandbox, &server, TOKEN, "run me/poems").succeeds();
    server.with(|hub| assert_eq!(hub.commits.len(), 1));
}

#[test]
fn the_token_comes_from_the_usual_file() {
    let (sandbox, server) = (run(), hub());
    fs::create_dir_all(sandbox.path("hf")).unwrap();
    sandbox.write("hf/token", format!("{TOKEN}\n"));
    push(&sandbox, &server, "", "run me/poems").succeeds();
}

#[test]
fn a_base_in_a_folder_is_pushed_under_a_name_that_others_know() {
    let (sandbox, server) = (run(), hub());
    let path = sandbox.path("run/adapter/adapter_config.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"embedded\"", "\"/somewhere/base\"");
    fs::write(&path, &text).unwrap();
    push(&sandbox, &server, TOKEN, "run me/x").refused(&["/somewhere/base", "--base ID"]);
    push(&sandbox, &server, TOKEN, "run me/x --base gpt2").succeeds();
    server.with(|hub| {
        let content = |index: usize| {
            let encoded = hub.commits[0].1[index]["value"]["content"].as_str().unwrap();
            String::from_utf8(STANDARD.decode(encoded).unwrap()).unwrap()
        };
        assert!(content(1).contains("\"base_model_name_or_path\": \"gpt2\""), "{}", content(1));
        assert!(content(3).starts_with("---\nbase_model: gpt2\n"), "{}", content(3));
    });
    assert_eq!(fs::read_to_string(&path).unwrap(), text, "the folder itself is left alone");
}
