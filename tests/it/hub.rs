//! Names to local files, against a hub on a local port.

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    sync::Barrier,
    time::Duration,
};

use engraft::{
    error::{Error, Result},
    hub::{self, HubOptions, Progress},
    model::{Base, BaseSource},
};
use tempfile::TempDir;

use crate::hub_server::{COMMIT, Hub, Server};

/// An address that refuses connections.
const NOBODY: &str = "http://127.0.0.1:9";

/// The tiny golden base, with files that nobody needs.
fn files() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bases/tiny");
    ["config.json", "model.safetensors"]
        .map(|name| (name.to_owned(), fs::read(folder.join(name)).unwrap()))
        .into_iter()
        .chain(small(&["tokenizer.json", "vocab.json", "merges.txt", "README.md", "pytorch_model.bin"]))
        .collect()
}

fn small(names: &[&str]) -> Vec<(String, Vec<u8>)> {
    names.iter().map(|name| (name.to_string(), format!("content of {name}").into_bytes())).collect()
}

fn options(endpoint: &str, cache: &TempDir) -> HubOptions {
    HubOptions { endpoint: Some(endpoint.into()), cache: cache.path().into(), ..HubOptions::default() }
}

fn fetch(name: &str, options: &HubOptions) -> Result<PathBuf> {
    hub::base(name, options, &|_| {})
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn assert_error(error: &Error, code: u8, parts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.exit_code(), code, "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn fetches_what_is_needed_into_the_shared_layout() {
    let server = Server::start(Hub::new("owner/tiny", files()));
    let cache = tempfile::tempdir().unwrap();
    let seen = RefCell::new(Vec::<Progress>::new());
    let source = hub::base("owner/tiny", &options(&server.endpoint, &cache), &|progress| {
        seen.borrow_mut().push(progress);
    })
    .unwrap();

    let snapshot = cache.path().join("models--owner--tiny/snapshots").join(COMMIT);
    assert_eq!(source, snapshot);
    assert_eq!(names(&snapshot), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read_to_string(cache.path().join("models--owner--tiny/refs/main")).unwrap(), COMMIT);
    assert_eq!(names(&cache.path().join("models--owner--tiny")), ["blobs", "refs", "snapshots"]);
    assert_eq!(names(&cache.path().join("models--owner--tiny/blobs")).len(), 3);
    let size = fs::metadata(snapshot.join("model.safetensors")).unwrap().len();
    let last = seen.borrow().iter().rfind(|progress| progress.file == "model.safetensors").cloned().unwrap();
    assert_eq!((last.bytes, last.total), (size, size));

    let base =
        Base::load(&BaseSource::Folder(source.clone()), "owner/tiny", &cache.path().join("fp16")).unwrap();
    assert_eq!(base.description().revision.as_deref(), Some(COMMIT));

    // Again: the hub is asked which commit is current, nothing is downloaded.
    server.log();
    assert_eq!(fetch("owner/tiny", &options(&server.endpoint, &cache)).unwrap(), source);
    assert_eq!(server.log(), ["HEAD /owner/tiny/resolve/main/config.json"]);

    // A commit cannot change: nobody is asked.
    let pinned = HubOptions { revision: Some(COMMIT.into()), ..options(NOBODY, &cache) };
    assert_eq!(fetch("owner/tiny", &pinned).unwrap(), source);

    // Without a network the cached files are used.
    assert_eq!(fetch("owner/tiny", &options(NOBODY, &cache)).unwrap(), source);
}

#[test]
fn offline_uses_the_cache_and_asks_nobody() {
    let server = Server::start(Hub::new("tiny", files()));
    let cache = tempfile::tempdir().unwrap();
    let offline = HubOptions { offline: true, ..options(&server.endpoint, &cache) };
    let error = fetch("tiny", &offline).unwrap_err();
    let wanted = "tiny: config.json at revision main is not in";
    assert_error(&error, 2, &[wanted, "run once without --offline, or give a folder"]);
    assert!(server.log().is_empty());

    let online = fetch("tiny", &options(&server.endpoint, &cache)).unwrap();
    server.log();
    assert_eq!(fetch("tiny", &offline).unwrap(), online);
    assert!(server.log().is_empty());

    fs::remove_file(online.join("model.safetensors")).unwrap();
    assert_error(
        &fetch("tiny", &offline).unwrap_err(),
        2,
        &["model.safetensors", "run once without --offline"],
    );
}

#[test]
fn takes_tokenizer_and_weights_in_the_form_that_is_there() {
    let get = |files: Vec<(String, Vec<u8>)>| {
        let server = Server::start(Hub::new("m", files));
        let cache = tempfile::tempdir().unwrap();
        fetch("m", &options(&server.endpoint, &cache)).map(|source| names(&source))
    };
    let found = get(small(&["config.json", "vocab.json", "merges.txt", "pytorch_model.bin"])).unwrap();
    assert_eq!(found, ["config.json", "merges.txt", "pytorch_model.bin", "vocab.json"]);

    let mut sharded = small(&["config.json", "a.safetensors", "b.safetensors", "c.safetensors"]);
    let index = r#"{"weight_map":{"x":"b.safetensors","y":"a.safetensors","z":"b.safetensors"}}"#;
    sharded.push(("model.safetensors.index.json".into(), index.into()));
    let found = get(sharded.clone()).unwrap();
    assert_eq!(found, ["a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json"]);

    sharded.retain(|(name, _)| name != "a.safetensors");
    assert_error(&get(sharded).unwrap_err(), 2, &["m: holds no a.safetensors at revision main; choose"]);
    let error = get(small(&["config.json"])).unwrap_err();
    assert_error(
        &error,
        2,
        &["m: holds no model.safetensors, model.safetensors.index.json or pytorch_model.bin"],
    );
    assert_error(&get(small(&["README.md"])).unwrap_err(), 2, &["m: holds no config.json at revision main"]);
}

#[test]
fn adapters_come_flat_or_in_folders_of_methods() {
    let get = |names: &[&str]| {
        let server = Server::start(Hub::new("me/adapter", small(names)));
        let cache = tempfile::tempdir().unwrap();
        let found = hub::adapter("me/adapter", &options(&server.endpoint, &cache), &|_| {})?;
        for name in names.iter().filter(|name| name.contains("adapter_")) {
            assert_eq!(fs::read_to_string(found.join(name)).unwrap(), format!("content of {name}"));
        }
        Ok::<_, Error>(self::names(&found))
    };
    let flat = ["adapter_config.json", "adapter_model.safetensors"];
    assert_eq!(get(&[flat[0], flat[1], "README.md"]).unwrap(), flat);
    let both = [
        "ln_tuning/adapter_config.json",
        "ln_tuning/adapter_model.safetensors",
        "lora/adapter_config.json",
        "lora/adapter_model.safetensors",
        "prefix/adapter_config.json",
        "prefix/adapter_model.safetensors",
    ];
    assert_eq!(get(&both).unwrap(), ["ln_tuning", "lora", "prefix"]);
    assert_error(&get(&both[..5]).unwrap_err(), 2, &["holds no prefix/adapter_model.safetensors"]);
    assert_error(&get(&["README.md"]).unwrap_err(), 2, &["me/adapter: holds no adapter_config.json"]);
}

#[test]
fn unknown_models_and_revisions_are_told_apart() {
    let server = Server::start(Hub::new("owner/tiny", files()));
    let cache = tempfile::tempdir().unwrap();
    let online = options(&server.endpoint, &cache);
    let error = fetch("owner/other", &online).unwrap_err();
    assert_error(&error, 2, &["owner/other: the hub knows no model of this name; check the id"]);
    let wrong = HubOptions { revision: Some("v9".into()), ..online };
    assert_error(
        &fetch("owner/tiny", &wrong).unwrap_err(),
        2,
        &["owner/tiny: has no revision v9; give", "--revision"],
    );
}

#[test]
fn tokens_and_licences_are_asked_for() {
    let server = Server::start(Hub { token: Some("hf_good"), ..Hub::new("me/private", files()) });
    let cache = tempfile::tempdir().unwrap();
    let with = |token: Option<&str>| HubOptions {
        token: token.map(str::to_owned),
        ..options(&server.endpoint, &cache)
    };
    let error = fetch("me/private", &with(None)).unwrap_err();
    assert_error(&error, 2, &["me/private: the hub knows no public model of this name", "HF_TOKEN"]);
    let error = fetch("me/private", &with(Some("hf_bad"))).unwrap_err();
    assert_error(&error, 2, &["me/private: the hub refuses the token"]);
    assert!(!error.to_string().contains("hf_bad"), "a token is secret");

    server.with(|hub| hub.gated = true);
    for token in [None, Some("hf_good")] {
        let error = fetch("me/private", &with(token)).unwrap_err();
        assert_error(&error, 2, &["me/private: is gated; accept its licence", "HF_TOKEN"]);
    }
    server.with(|hub| hub.gated = false);
    fetch("me/private", &with(Some("hf_good"))).unwrap();
}

#[test]
fn a_cut_download_goes_on_where_it_stopped() {
    let weights: Vec<u8> =
        (0..20_000_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut files = small(&["config.json", "tokenizer.json"]);
    files.push(("model.safetensors".into(), weights.clone()));
    let server = Server::start(Hub { cuts: vec![9_000_003, 100], ..Hub::new("big", files) });
    let cache = tempfile::tempdir().unwrap();
    let online = options(&server.endpoint, &cache);

    let error = fetch("big", &online).unwrap_err();
    assert_error(&error, 1, &["big: the download of model.safetensors was cut", "run the command again"]);
    server.log();
    // Cut once more, in a range: what came before stays.
    assert_error(&fetch("big", &online).unwrap_err(), 1, &["was cut"]);
    assert!(server.log().contains(&"GET /cdn/model.safetensors bytes=9000003-17388610".to_owned()));

    let seen = RefCell::new(Vec::<u64>::new());
    let source = hub::base("big", &online, &|progress| {
        if progress.file == "model.safetensors" {
            seen.borrow_mut().push(progress.bytes);
        }
    })
    .unwrap();
    let log = server.log();
    let gets: Vec<_> = log.iter().filter(|line| line.starts_with("GET /cdn")).collect();
    let wanted = ["bytes=9000003-17388610", "bytes=17388611-19999999"]
        .map(|range| format!("GET /cdn/model.safetensors {range}"));
    assert_eq!(gets, wanted.iter().collect::<Vec<_>>());
    assert_eq!((seen.borrow()[0], *seen.borrow().last().unwrap()), (9_000_003, 20_000_000));
    assert!(fs::read(source.join("model.safetensors")).unwrap() == weights);
    let repo = cache.path().join("models--big");
    assert_eq!(names(&repo), ["blobs", "refs", "snapshots"]);
    assert!(names(&repo.join("blobs")).iter().all(|name| !name.contains("incomplete")));
}

#[test]
fn a_note_that_fits_nothing_starts_anew() {
    let server = Server::start(Hub { cuts: vec![1000], ..Hub::new("tiny", files()) });
    let cache = tempfile::tempdir().unwrap();
    let online = options(&server.endpoint, &cache);
    for damage in ["{", r#"{"etag":"../../x","size":3}"#, r#"{"etag":"gone","size":3}"#] {
        server.with(|hub| hub.cuts = vec![1000]);
        fetch("tiny", &online).unwrap_err();
        let note = cache.path().join("models--tiny/.engraft/model.safetensors.json");
        assert!(note.exists());
        fs::write(&note, damage).unwrap();
        let source = fetch("tiny", &online).unwrap();
        let whole = server.with(|hub| hub.files["model.safetensors"].clone());
        assert_eq!(fs::read(source.join("model.safetensors")).unwrap(), whole);
        fs::remove_dir_all(cache.path().join("models--tiny")).unwrap();
    }
}

#[test]
fn a_network_that_is_not_there_is_one_sentence() {
    let cache = tempfile::tempdir().unwrap();
    let error = fetch("gpt2", &options(NOBODY, &cache)).unwrap_err();
    assert_error(
        &error,
        1,
        &["gpt2: the hub cannot be reached", "check the network, or give a folder", "hint: --offline"],
    );
    let error = fetch("gpt2", &options("no address", &cache)).unwrap_err();
    assert_error(&error, 2, &["the hub's address no address cannot be used", "HF_ENDPOINT"]);
}

#[test]
fn answers_that_are_errors_are_not_stored() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(Hub { status: Some(503), ..Hub::new("tiny", files()) });
    let error = fetch("tiny", &options(&server.endpoint, &cache)).unwrap_err();
    assert_error(&error, 1, &["tiny: the hub answered 503", "try again later"]);
    server.with(|hub| hub.status = Some(429));
    assert_error(&fetch("tiny", &options(&server.endpoint, &cache)).unwrap_err(), 1, &["limits the rate"]);
    server.with(|hub| hub.status = None);

    // A HEAD that goes well and a page of an error in place of the file.
    server.with(|hub| hub.get_status = Some(403));
    let error = fetch("tiny", &options(&server.endpoint, &cache)).unwrap_err();
    assert_error(&error, 1, &["tiny: the hub sent 7 of the 816 bytes of config.json"]);
    server.with(|hub| hub.get_status = None);
    let source = fetch("tiny", &options(&server.endpoint, &cache)).unwrap();
    Base::load(&BaseSource::Folder(source.clone()), "tiny", cache.path()).unwrap();
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let server = Server::start(Hub::new("tiny", files()));
    let file = tempfile::NamedTempFile::new().unwrap();
    let blocked = HubOptions {
        cache: file.path().join("hub"),
        ..options(&server.endpoint, &tempfile::tempdir().unwrap())
    };
    assert_error(&fetch("tiny", &blocked).unwrap_err(), 1, &["config.json cannot be stored in", "HF_HOME"]);
}

#[test]
fn concurrent_fetches_share_one_cache() {
    // Late enough that all four ask for the weights before the first has them.
    let server = Server::start(Hub { delay: Duration::from_millis(300), ..Hub::new("tiny", files()) });
    let cache = tempfile::tempdir().unwrap();
    let online = options(&server.endpoint, &cache);
    let fp16 = cache.path().join("fp16");
    let start = Barrier::new(4);
    let sources: Vec<_> = std::thread::scope(|scope| {
        let fetches: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let source = fetch("tiny", &online).unwrap();
                    Base::load(&BaseSource::Folder(source.clone()), "tiny", &fp16).unwrap();
                    source
                })
            })
            .collect();
        fetches.into_iter().map(|fetch| fetch.join().unwrap()).collect()
    });
    assert!(sources.iter().all(|source| *source == sources[0]), "{sources:?}");

    // Each file was downloaded once, by any of the four.
    let log = server.log();
    let downloads = |file: &str| {
        let is_of = |line: &&String| line.starts_with("GET /tiny/") && line.ends_with(&format!("/{file}"));
        log.iter().filter(is_of).count()
    };
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        assert_eq!(downloads(file), 1, "{file}: {log:?}");
    }
    assert_eq!(log.iter().filter(|line| line.starts_with("GET /cdn/")).count(), 1, "{log:?}");

    // The cache holds each file once and nothing half done.
    let repo = cache.path().join("models--tiny");
    assert_eq!(names(&repo), ["blobs", "refs", "snapshots"]);
    assert_eq!(names(&sources[0]), ["config.json", "model.safetensors", "tokenizer.json"]);
    let held = server.with(|hub| hub.files.clone());
    let mut blobs: Vec<_> = ["config.json", "tokenizer.json", "model.safetensors"]
        .map(|file| blake3::hash(&held[file]).to_hex().to_string())
        .into();
    blobs.sort();
    assert_eq!(names(&repo.join("blobs")), blobs);
    for file in names(&sources[0]) {
        let path = sources[0].join(&file);
        assert!(
            path.canonicalize().unwrap().starts_with(repo.join("blobs").canonicalize().unwrap()),
            "{file}"
        );
        assert!(fs::read(path).unwrap() == held[&file], "{file}");
    }
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(names(&fp16).len(), 1, "{:?}", names(&fp16));
}
