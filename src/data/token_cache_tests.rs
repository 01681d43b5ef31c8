//! Tests of the token cache: what is found again, and above all what is not.

use std::time::Duration;

use super::*;
use crate::data::{
    Split, load,
    testing::{options, tokenizer},
};

/// A text whose rows go to a file, more than 1 MiB of them.
fn long(word: &str) -> String {
    format!("hello the {word}\n").repeat(30_000)
}

struct Case {
    folder: tempfile::TempDir,
    options: DataOptions,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(64);
        options.read.token_cache = Some(folder.path().join("tokens"));
        let case = Self { folder, options };
        case.write("a.txt", &long("end"));
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn load(&self, name: &str) -> Dataset {
        load(&[self.path(name)], Split::Train, Some(&tokenizer()), &self.options).unwrap()
    }

    /// The same without the cache.
    fn anew(&self, name: &str) -> Dataset {
        let mut options = self.options.clone();
        options.read.token_cache = None;
        load(&[self.path(name)], Split::Train, Some(&tokenizer()), &options).unwrap()
    }

    /// Entries of the cache, by key.
    fn entries(&self) -> Vec<String> {
        let names = fs::read_dir(self.path("tokens")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut keys: Vec<_> =
            names.filter_map(|name| Some(name.strip_suffix(".json")?.to_owned())).collect();
        keys.sort();
        keys
    }
}

#[track_caller]
fn same(found: &Dataset, expected: &Dataset) {
    assert_eq!((found.report, &found.fingerprint), (expected.report, &expected.fingerprint));
    assert!(found.rows == expected.rows);
    assert_eq!(found.hints, expected.hints);
    assert_eq!(found.longest(), expected.longest());
}

#[test]
fn a_second_load_is_the_first_one_from_the_disk() {
    let case = Case::new();
    let (anew, first) = (case.anew("a.txt"), case.load("a.txt"));
    same(&first, &anew);
    assert_eq!(case.entries().len(), 1);
    // Proof that the second does not tokenise: the rows are those of the file, even if it is another.
    let key = case.entries().remove(0);
    let about = case.path("tokens").join(format!("{key}.json"));
    let text = fs::read_to_string(&about).unwrap();
    fs::write(&about, text.replace(&anew.fingerprint, "marked")).unwrap();
    let second = case.load("a.txt");
    assert_eq!(second.fingerprint, "marked");
    assert!(second.rows == anew.rows);
    let mapped = second.memory();
    assert!(mapped.0 == 0 && mapped.1 > 1 << 20, "{mapped:?}");
}

#[test]
fn another_content_tokenizer_or_option_is_another_entry() {
    let case = Case::new();
    case.load("a.txt");
    case.write("b.txt", &long("end"));
    same(&case.load("b.txt"), &case.anew("b.txt"));
    assert_eq!(case.entries().len(), 1, "the same content has the same entry, whatever its name");
    case.write("a.txt", &long("hell"));
    same(&case.load("a.txt"), &case.anew("a.txt"));
    assert_eq!(case.entries().len(), 2);
    let changes: [fn(&mut DataOptions); 6] = [
        |options| options.seq_len = 63,
        |options| options.pack = true,
        |options| options.line_by_line = true,
        |options| options.prompt = 2,
        |options| options.end_of_text = 1,
        |options| options.read.format = Some(Kind::Text),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut changed = Case { folder: tempfile::tempdir().unwrap(), options: case.options.clone() };
        change(&mut changed.options);
        let before = case.entries().len();
        let found = load(&[case.path("b.txt")], Split::Train, Some(&tokenizer()), &changed.options).unwrap();
        changed.options.read.token_cache = None;
        let anew = load(&[case.path("b.txt")], Split::Train, Some(&tokenizer()), &changed.options).unwrap();
        same(&found, &anew);
        // The format that the extension tells makes the same rows.
        assert_eq!(case.entries().len() - before, usize::from(index < 5), "change {index}");
    }
    let mut json: serde_json::Value = serde_json::from_slice(crate::data::testing::FIXTURE).unwrap();
    json["model"]["merges"].as_array_mut().unwrap().pop();
    let other = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let before = case.entries().len();
    load(&[case.path("b.txt")], Split::Train, Some(&other), &case.options).unwrap();
    assert_eq!(case.entries().len(), before + 1, "another tokenizer");
}

#[test]
fn a_file_that_changed_in_place_is_read_again() {
    let case = Case::new();
    case.load("a.txt");
    let old = fs::metadata(case.path("a.txt")).unwrap();
    // The same length, the same time of modification, at once: what a cache by time and size would miss.
    case.write("a.txt", &long("hel"));
    let file = File::options().append(true).open(case.path("a.txt")).unwrap();
    file.set_modified(old.modified().unwrap()).unwrap();
    assert_eq!(fs::metadata(case.path("a.txt")).unwrap().len(), old.len());
    same(&case.load("a.txt"), &case.anew("a.txt"));
}

#[test]
fn a_note_is_trusted_only_of_a_file_that_was_left_alone() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    let stamp = |age: Duration| {
        let then = now - age.as_nanos();
        Stamp { bytes: 1, modified: then, changed: then as i128, inode: 1, device: 1 }
    };
    assert!(stamp(Duration::from_secs(3)).settled_before(now));
    assert!(!stamp(Duration::from_millis(1500)).settled_before(now));
    let later = Stamp { changed: now as i128, ..stamp(Duration::from_secs(9)) };
    assert!(!later.settled_before(now), "the time that nobody sets back counts too");
}

#[test]
fn damaged_entries_are_made_again() {
    let case = Case::new();
    let anew = case.load("a.txt");
    let key = case.entries().remove(0);
    let rows = case.path("tokens").join(format!("{key}.rows"));
    let about = case.path("tokens").join(format!("{key}.json"));
    let bytes = fs::read(&rows).unwrap();
    fs::write(&rows, &bytes[..bytes.len() - 4]).unwrap();
    same(&case.load("a.txt"), &anew);
    assert_eq!(fs::read(&rows).unwrap(), bytes);
    fs::remove_file(&rows).unwrap();
    same(&case.load("a.txt"), &anew);
    fs::write(&about, "{").unwrap();
    same(&case.load("a.txt"), &anew);
}

#[test]
fn splits_and_weights_come_from_the_cache_as_they_were_made() {
    let case = Case::new();
    case.write("b.txt", &long("hell"));
    let sources = [case.path("a.txt:2"), case.path("b.txt:0.5")];
    let mut plain = case.options.clone();
    plain.read.token_cache = None;
    let load = |options: &DataOptions| load(&sources, Split::Train, Some(&tokenizer()), options).unwrap();
    let anew = load(&plain);
    let (first, second) = (load(&case.options), load(&case.options));
    same(&first, &anew);
    same(&second, &anew);
    let (kept, held_out) = anew.split(0.1, 7).unwrap();
    for data in [first, second, load(&case.options)] {
        let (found, found_out) = data.split(0.1, 7).unwrap();
        same(&found, &kept);
        same(&found_out, &held_out);
    }
}

#[test]
fn small_data_are_not_kept() {
    let case = Case::new();
    case.write("small.txt", "hello the end");
    case.load("small.txt");
    assert!(case.entries().is_empty());
}

#[test]
fn the_entries_that_were_not_used_for_longest_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let old = SystemTime::now() - Duration::from_secs(1000);
    for (key, age) in [("a", 30), ("b", 10), ("c", 20)] {
        for extension in [ROWS, ABOUT, "split-0-0"] {
            let path = folder.path().join(format!("{key}.{extension}"));
            fs::write(&path, [0; 100]).unwrap();
            File::options()
                .append(true)
                .open(&path)
                .unwrap()
                .set_modified(old - Duration::from_secs(age))
                .unwrap();
        }
    }
    let left = || {
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.retain(|name| name.ends_with(ROWS));
        names.sort();
        names.concat()
    };
    prune(folder.path(), 900, "a");
    assert_eq!(left(), "a.rowsb.rowsc.rows");
    prune(folder.path(), 650, "a");
    assert_eq!(left(), "a.rowsb.rows", "c is the oldest but a, which is in use");
    prune(folder.path(), 0, "a");
    assert_eq!(left(), "a.rows");
}
