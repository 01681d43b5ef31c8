//! Which files the values of `--data` stand for: files, folders, patterns, the standard input, each with a weight.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    formats::{self, Kind},
    options::ReadOptions,
};
use crate::error::{Error, Result};

/// The path that stands for the standard input.
pub const STANDARD_INPUT: &str = "-";

/// Whether one of `sources` is the standard input, perhaps with a weight (`-:2`): its data cannot be read again.
pub fn reads_standard_input(sources: &[PathBuf]) -> bool {
    sources.iter().any(|source| weighted(source).is_ok_and(|(path, _)| path.as_os_str() == STANDARD_INPUT))
}

/// The heaviest weight; a larger one is taken for a typing error.
const HEAVIEST: f64 = 10_000.0;

/// A part of the data, by its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Training rows, `train.*`.
    Train,
    /// Held-out rows for evaluation during training, `valid.*`.
    Valid,
    /// Rows that no training reads, `test.*`.
    Test,
}

impl Split {
    const ALL: [Self; 3] = [Self::Train, Self::Valid, Self::Test];

    /// The file name in a folder, without its extension.
    pub fn stem(self) -> &'static str {
        self.stems()[0]
    }

    /// Every file name that means the split; the first one that a folder has is taken.
    fn stems(self) -> &'static [&'static str] {
        match self {
            Self::Train => &["train"],
            Self::Valid => &["valid", "validation", "dev"],
            Self::Test => &["test"],
        }
    }
}

/// A file to read.
#[derive(Debug, Clone, PartialEq)]
pub struct DataFile {
    /// Its path, or `-`.
    pub path: PathBuf,
    /// How often its rows come in an epoch.
    pub weight: f64,
}

impl DataFile {
    /// Its name in messages.
    pub(super) fn name(&self) -> String {
        match self.is_standard_input() {
            true => "standard input".to_owned(),
            false => self.path.display().to_string(),
        }
    }

    /// Whether it is what is piped into the program.
    pub(super) fn is_standard_input(&self) -> bool {
        self.path.as_os_str() == STANDARD_INPUT
    }

    /// Its content, unpacked, and its format; `counter` counts the bytes of the file.
    ///
    /// # Errors
    /// When it cannot be opened, or its name tells no format.
    pub(super) fn open(
        &self,
        options: &ReadOptions,
        counter: Arc<AtomicU64>,
    ) -> Result<(Box<dyn Read + Send>, Kind)> {
        if !self.is_standard_input() {
            let kind = options.format.map_or_else(|| Kind::of(&self.path), Ok)?;
            return match kind {
                Kind::Parquet => Ok((formats::open_rows(&self.path, counter)?, kind)),
                _ => Ok((formats::open(&self.path, counter)?, kind)),
            };
        }
        if options.format == Some(Kind::Parquet) {
            return Err(Error::input(
                "--data -: a Parquet file is read from its end, and so not from the standard input; name the file",
            ));
        }
        let open = options
            .standard_input
            .ok_or_else(|| Error::input("--data -: there is no standard input here; name a file"))?;
        formats::open_unnamed(&self.name(), Box::new(Counted { from: open(), counter }), options.format)
    }
}

/// Counts the bytes that are read.
pub(super) struct Counted<R> {
    pub from: R,
    pub counter: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(bytes)?;
        self.counter.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// The files of `split`: a file belongs to every split, and of a folder the files
/// `train.*`, `valid.*` or `test.*` are taken, in the order of their names. `format`: that of every file, where the
/// user named it.
///
/// # Errors
/// No source, a path that is not there, a folder without files of the split, an extension that no format has.
pub fn files(sources: &[PathBuf], split: Split, format: Option<Kind>) -> Result<Vec<DataFile>> {
    if sources.is_empty() {
        return Err(Error::input("--data: names no file; give a .txt, a .jsonl or a folder with train.*"));
    }
    let mut files = Vec::new();
    for source in sources {
        let (path, weight) = weighted(source)?;
        let paths = matches(&path)?;
        for path in paths {
            let inside = if path.is_dir() { of_folder(&path, split, format)? } else { vec![path] };
            files.extend(inside.into_iter().map(|path| DataFile { path, weight }));
        }
    }
    let mut named = files.iter().filter(|file| !file.is_standard_input() && format.is_none());
    named.try_for_each(|file| Kind::of(&file.path).map(drop))?;
    Ok(files)
}

/// `FILE:WEIGHT` as both; a path that exists as it stands has weight 1.
fn weighted(source: &Path) -> Result<(PathBuf, f64)> {
    let whole = || Ok((source.to_owned(), 1.0));
    if source.exists() {
        return whole();
    }
    let Some((path, Ok(weight))) = source
        .to_str()
        .and_then(|text| text.rsplit_once(':'))
        .map(|(path, weight)| (path, weight.parse::<f64>()))
    else {
        return whole();
    };
    if !(weight > 0.0 && weight <= HEAVIEST) {
        return Err(Error::input(format!(
            "--data {}: is a file of weight {weight}; give a weight above 0, up to {HEAVIEST}",
            source.display()
        )));
    }
    Ok((path.into(), weight))
}

/// The paths that `path` stands for: itself, or what a pattern with `*`, `?` or `[..]` matches, by name.
fn matches(path: &Path) -> Result<Vec<PathBuf>> {
    if path.as_os_str() == STANDARD_INPUT {
        return Ok(vec![path.to_owned()]);
    }
    let pattern = path.to_str().filter(|text| text.contains(['*', '?', '[']));
    let missing = match fs::metadata(path) {
        Ok(_) => return Ok(vec![path.to_owned()]),
        Err(cause) => Error::reading(path, &cause),
    };
    let Some(pattern) = pattern else { return Err(missing) };
    let found = glob::glob(pattern).map_err(|cause| {
        Error::input(format!("{pattern}: is no pattern: {cause}; correct it, or name the files"))
    })?;
    let found: Vec<PathBuf> = found.filter_map(|entry| entry.ok()).collect();
    if found.is_empty() {
        return Err(Error::input(format!("{pattern}: matches no file; check the pattern")));
    }
    Ok(found)
}

/// Whether every source is a folder that holds files of `split`: `--data DIR` then brings its own
/// held-out data.
///
/// # Errors
/// A path that cannot be read.
pub fn has_split(sources: &[PathBuf], split: Split) -> Result<bool> {
    for source in sources {
        let (path, _) = weighted(source)?;
        if !path.is_dir() || members(&path, split)?.is_empty() {
            return Ok(false);
        }
    }
    Ok(!sources.is_empty())
}

/// The files of `split` in `folder`. A folder in which no name tells a split is training data as a whole.
fn of_folder(folder: &Path, split: Split, format: Option<Kind>) -> Result<Vec<PathBuf>> {
    let mut inside = members(folder, split)?;
    let names_none = || -> Result<bool> {
        let named = Split::ALL.map(|split| members(folder, split));
        named.into_iter().try_fold(true, |none, found| Ok(none && found?.is_empty()))
    };
    if inside.is_empty() && split == Split::Train && names_none()? {
        inside = entries(folder)?;
        inside.retain(|path| format.is_some() || Kind::of(path).is_ok());
    }
    if inside.is_empty() {
        return Err(Error::input(format!(
            "{}: holds no {stem}.txt, {stem}.jsonl or the like; add one or name the file itself",
            folder.display(),
            stem = split.stem()
        )));
    }
    Ok(inside)
}

/// The files of `folder`, sorted by name, without hidden ones.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |cause| Error::reading(folder, &cause);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_hidden = path.file_name().unwrap_or_default().to_string_lossy().starts_with('.');
        if !is_hidden && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Files named `<stem>.<anything>` in `folder`, else those of a data set in parts, `<stem>-00000-of-00004.<anything>`.
fn members(folder: &Path, split: Split) -> Result<Vec<PathBuf>> {
    let all = entries(folder)?;
    let rest = |path: &Path, stem: &str| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.strip_prefix(stem).map(str::to_owned)
    };
    let is_whole = |rest: &str| rest.starts_with('.');
    let is_part = |rest: &str| {
        rest.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    for stem in split.stems() {
        for fits in [&is_whole as &dyn Fn(&str) -> bool, &is_part] {
            let of_stem = all.iter().filter(|path| rest(path, stem).is_some_and(|rest| fits(&rest)));
            let found: Vec<PathBuf> = of_stem.cloned().collect();
            if !found.is_empty() {
                return Ok(found);
            }
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        names.iter().for_each(|name| fs::write(folder.path().join(name), "x").unwrap());
        folder
    }

    fn files(sources: &[PathBuf], split: Split) -> Result<Vec<DataFile>> {
        super::files(sources, split, None)
    }

    fn names(files: &[DataFile]) -> Vec<String> {
        files.iter().map(|file| file.path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_folder_gives_the_files_of_the_split() {
        let folder = folder(&["train.txt", "train.jsonl", "valid.txt", "training.txt", "README.md"]);
        let sources = [folder.path().to_owned()];
        assert_eq!(names(&files(&sources, Split::Train).unwrap()), ["train.jsonl", "train.txt"]);
        assert_eq!(names(&files(&sources, Split::Valid).unwrap()), ["valid.txt"]);
        let error = files(&sources, Split::Test).unwrap_err().to_string();
        assert!(error.contains(": holds no test.txt, test.jsonl or the like; "), "{error}");
        assert!(has_split(&sources, Split::Valid).unwrap());
        assert!(!has_split(&sources, Split::Test).unwrap());
    }

    #[test]
    fn data_sets_in_parts_and_other_names_of_held_out_data_are_found() {
        let folder = folder(&[
            "train-00001-of-00002.jsonl",
            "train-00000-of-00002.jsonl.gz",
            "train-notes.txt",
            "validation.json",
        ]);
        let sources = [folder.path().to_owned()];
        let parts = ["train-00000-of-00002.jsonl.gz", "train-00001-of-00002.jsonl"];
        assert_eq!(names(&files(&sources, Split::Train).unwrap()), parts);
        assert_eq!(names(&files(&sources, Split::Valid).unwrap()), ["validation.json"]);
    }

    #[test]
    fn a_folder_without_names_of_splits_is_training_data() {
        let folder = folder(&["b.csv", "a.txt", "README.md", ".hidden.txt"]);
        let sources = [folder.path().to_owned()];
        assert_eq!(names(&files(&sources, Split::Train).unwrap()), ["a.txt", "b.csv"]);
        assert!(files(&sources, Split::Valid).is_err());
        fs::write(folder.path().join("test.txt"), "x").unwrap();
        assert!(files(&sources, Split::Train).is_err(), "now test.txt says what the names mean");
    }

    #[test]
    fn a_file_is_itself_and_the_order_of_the_options_stays() {
        let folder = folder(&["train.txt", "b.jsonl", "a.txt"]);
        let sources = ["b.jsonl", "a.txt", ""].map(|name| folder.path().join(name));
        assert_eq!(names(&files(&sources, Split::Train).unwrap()), ["b.jsonl", "a.txt", "train.txt"]);
        assert_eq!(names(&files(&sources[..1], Split::Valid).unwrap()), ["b.jsonl"]);
        assert!(!has_split(&sources, Split::Train).unwrap());
    }

    #[test]
    fn patterns_match_by_name_unless_a_file_has_the_name() {
        let folder = folder(&["b.txt", "a.txt", "c.jsonl", "[x].txt"]);
        let found = |pattern: &str| files(&[folder.path().join(pattern)], Split::Train);
        assert_eq!(names(&found("?.txt").unwrap()), ["a.txt", "b.txt"]);
        assert_eq!(names(&found("[x].txt").unwrap()), ["[x].txt"]);
        assert!(found("*.csv").unwrap_err().to_string().contains("*.csv: matches no file"));
    }

    #[test]
    fn weights_follow_a_colon_unless_a_file_has_the_name() {
        let folder = folder(&["a.txt", "b.txt:2", "c.txt"]);
        let found = |name: &str| {
            let files = files(&[folder.path().join(name)], Split::Train)?;
            Ok::<_, Error>(files.iter().map(|file| file.weight).collect::<Vec<_>>())
        };
        assert_eq!(found("a.txt:2").unwrap(), [2.0]);
        assert_eq!(found("?.txt:0.5").unwrap(), [0.5, 0.5]);
        assert!(found("b.txt:2").unwrap_err().to_string().contains(".txt:2 files are not read"));
        assert!(found("b.txt:2:3").unwrap_err().to_string().contains(".txt:2 files are not read"));
        for wrong in ["a.txt:0", "a.txt:-1", "a.txt:NaN", "a.txt:1e9"] {
            assert!(found(wrong).unwrap_err().to_string().contains("give a weight above 0"), "{wrong}");
        }
        assert!(found("a.txt:x").unwrap_err().to_string().contains("a.txt:x: cannot be read"));
        let standard = super::files(&["-:3".into(), "-".into()], Split::Train, None).unwrap();
        assert_eq!(standard.iter().map(|file| file.weight).collect::<Vec<_>>(), [3.0, 1.0]);
        assert!(standard.iter().all(|file| file.name() == "standard input"));
    }

    #[test]
    fn other_extensions_are_refused_by_name() {
        let folder = folder(&["train.xlsx", "train.txt"]);
        let sources = [folder.path().to_owned()];
        let error = files(&sources, Split::Train).unwrap_err().to_string();
        assert!(error.contains("train.xlsx: .xlsx files are not read"), "{error}");
        assert_eq!(super::files(&sources, Split::Train, Some(Kind::Text)).unwrap().len(), 2);
    }

    #[test]
    fn missing_paths_and_no_path_are_refused() {
        let folder = folder(&[]);
        let error = files(&[folder.path().join("no.txt")], Split::Train).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("no.txt: cannot be read"), "{error}");
        assert!(files(&[], Split::Train).unwrap_err().to_string().starts_with("--data: "));
    }
}
