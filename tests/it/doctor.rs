//! `engraft doctor` and `engraft cache`.

use std::fs;

use crate::{
    cli_support::Sandbox,
    hub_server::{Hub, Server},
};

#[test]
fn doctor_tells_what_is_here() {
    let sandbox = Sandbox::new();
    let text = sandbox.engraft("doctor").succeeds().stdout();
    for name in ["engraft", "CPU", "BF16", "GPU", "memory", "cache", "downloads", "token", "hub"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "no {name} in {text}");
    }
    assert!(text.contains("not asked (HF_HUB_OFFLINE)"), "{text}");
    let json = sandbox.engraft("doctor --json").succeeds().events().remove(0);
    assert!(json["memory"]["found"].as_str().unwrap().contains("free of"), "{json}");
    assert!(
        json["cache"]["found"].as_str().unwrap().contains(sandbox.path("cache").to_str().unwrap()),
        "{json}"
    );
}

#[test]
fn doctor_asks_the_hub() {
    let sandbox = Sandbox::new();
    let hub = |endpoint: &str, token: &str| {
        let mut command = sandbox.command("doctor --json");
        command.env("HF_ENDPOINT", endpoint).env("HF_HUB_OFFLINE", "0").env("HF_TOKEN", token);
        let output = crate::cli_support::Finished(command.output().unwrap()).succeeds();
        output.events().remove(0)["hub"].clone()
    };
    let server = Server::start(Hub::new("owner/tiny", []));
    let found = hub(&server.endpoint, "");
    assert_eq!(
        (found["ok"].as_bool(), found["found"].as_str().unwrap()),
        (Some(true), &format!("{} answers", server.endpoint)[..])
    );
    server.with(|hub| hub.status = Some(401));
    let refused = hub(&server.endpoint, "hf_x");
    assert!(
        refused["ok"] == false && refused["found"].as_str().unwrap().contains("refuses the token"),
        "{refused}"
    );
    let nobody = hub("http://127.0.0.1:9", "");
    assert!(
        nobody["ok"] == false && nobody["found"].as_str().unwrap().contains("cannot be reached"),
        "{nobody}"
    );
}

#[test]
fn the_cache_is_listed_and_pruned() {
    let sandbox = Sandbox::new();
    // A base in F32 is converted into the cache.
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/bases/tiny");
    sandbox.write("ids.jsonl", "{\"input_ids\":[1,2,3,4],\"labels\":[1,2,3,4]}\n");
    sandbox.engraft(&format!("eval --base {base} --data ids.jsonl --json")).succeeds();
    let list = sandbox.engraft("cache").succeeds().stdout();
    assert!(list.contains("bases") && list.contains("bases/tiny") && list.contains("today"), "{list}");
    let json = sandbox.engraft("cache --json").succeeds().events().remove(0);
    assert_eq!(json["entries"][0]["kind"], "bases");
    assert!(json["bytes"].as_u64().unwrap() > 0);
    // Nothing is that old.
    let old = sandbox.engraft("cache --prune --older-than 3 --yes").succeeds().stdout();
    assert!(old.starts_with("removed 0 entries"), "{old}");
    sandbox.engraft("cache --prune").refused(&["--prune: would remove 2 entries", "no terminal", "--yes"]);
    sandbox.engraft("cache --prune sugar").refused(&["--prune", "sugar", "bases"]);
    sandbox.write("cache/mine.txt", "x");
    let removed = sandbox.engraft("cache --prune bases --yes").succeeds().stdout();
    assert!(removed.starts_with("removed 1 entry"), "{removed}");
    let mut left: Vec<_> =
        fs::read_dir(sandbox.path("cache")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    // What the data file was when it was read, and the user's own file.
    assert_eq!(left, ["mine.txt", "tokens"]);
    // It is made again.
    sandbox.engraft(&format!("eval --base {base} --data ids.jsonl --json")).succeeds();
}

#[test]
fn pointers_and_pages_in_place_of_files_are_told() {
    let sandbox = Sandbox::new();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n";
    let page = "<!DOCTYPE html>\n<html><title>x</title></html>\n";
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/base");
    let (lfs, html) = (
        "is a pointer of Git LFS, not the file itself; run `git lfs pull`",
        "is an HTML page, not the file itself",
    );
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        for (text, sentence) in [(pointer, lfs), (page, html)] {
            let _ = fs::remove_dir_all(sandbox.path("base"));
            fs::create_dir(sandbox.path("base")).unwrap();
            for file in ["config.json", "model.safetensors", "tokenizer.json"] {
                fs::copy(format!("{source}/{file}"), sandbox.path("base").join(file)).unwrap();
            }
            fs::write(sandbox.path("base").join(name), text).unwrap();
            sandbox
                .engraft("eval --base base --data data.jsonl")
                .refused(&[&format!("base/{name}: {sentence}")[..]]);
        }
    }
    fs::remove_file(sandbox.path("base/model.safetensors")).unwrap();
    sandbox.write("base/pytorch_model.bin", pointer);
    sandbox
        .engraft("eval --base base --data data.jsonl")
        .refused(&["base/pytorch_model.bin: is a pointer of Git LFS"]);
    sandbox.train("--steps 1").succeeds();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        let path = sandbox.path("run/adapter").join(name);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, page).unwrap();
        sandbox
            .infer("generate --base embedded --adapter run --prompt x")
            .refused(&[&format!("{name}: {html}")[..]]);
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn adapters_that_are_not_read_come_with_a_remedy() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 1").succeeds();
    let path = sandbox.path("run/adapter/adapter_config.json");
    let text = fs::read_to_string(&path).unwrap();
    let with = |old: &str, new: &str| {
        assert!(text.contains(old), "{text}");
        fs::write(&path, text.replace(old, new)).unwrap();
        sandbox.infer("generate --base embedded --adapter run --prompt x")
    };
    with("\"LORA\"", "\"LOHA\"").refused(&["peft_type LOHA is not supported", "merge_and_unload()"]);
    let pissa = with("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"");
    pissa.refused(&["init_lora_weights", "merge_and_unload()"]);
    with("\"r\": 3", "\"r\": 4").refused(&["shape", "give the base that it was trained on"]);
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/bases/tiny");
    fs::write(&path, &text).unwrap();
    let refused = sandbox.infer(&format!("generate --base {other} --adapter run --input-ids 1"));
    let refused = refused.refused(&["engraft1:blake3:"]).stderr();
    // Sixty-four digits help nobody.
    assert!(!refused.split(|c: char| !c.is_ascii_hexdigit()).any(|word| word.len() > 12), "{refused}");
}

#[test]
fn a_tilde_is_explained() {
    let sandbox = Sandbox::new();
    sandbox
        .engraft("train --data=~/x.txt")
        .refused(&["~/x.txt", "~ stands for the home folder in a shell alone"]);
    sandbox
        .engraft("eval --base=~/x")
        .refused(&["--base ~/x", "~ stands for the home folder in a shell alone"]);
    sandbox
        .engraft("train --output=~/run")
        .refused(&["~/run", "~ stands for the home folder in a shell alone"]);
    assert!(!sandbox.path("~").exists());
}
