//! Which files a split consists of: files as given, folders by the names inside them.

use std::fs;
use std::path::{Path, PathBuf};

use super::records::Kind;
use crate::error::{Error, Result};

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
    /// The file name in a folder, without its extension.
    pub fn stem(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Valid => "valid",
            Self::Test => "test",
        }
    }
}

/// The files of `split`: a file belongs to every split, and of a folder the files
/// `train.*`, `valid.*` or `test.*` are taken, in the order of their names.
///
/// # Errors
/// No source, a path that is not there, a folder without files of the split, an extension that is
/// neither `.txt` nor `.jsonl`.
pub fn files(sources: &[PathBuf], split: Split) -> Result<Vec<PathBuf>> {
    if sources.is_empty() {
        return Err(Error::input("--data: names no file; give a .txt, a .jsonl or a folder with train.*"));
    }
    let mut files = Vec::new();
    for source in sources {
        let kind = fs::metadata(source).map_err(|cause| Error::reading(source, &cause))?;
        if kind.is_dir() {
            let inside = members(source, split)?;
            if inside.is_empty() {
                return Err(Error::input(format!(
                    "{}: holds no {stem}.txt or {stem}.jsonl; add one or name the file itself",
                    source.display(),
                    stem = split.stem()
                )));
            }
            files.extend(inside);
        } else {
            files.push(source.clone());
        }
    }
    files.iter().try_for_each(|file| Kind::of(file).map(drop))?;
    Ok(files)
}

/// Whether every source is a folder that holds files of `split`: `--data DIR` then brings its own
/// held-out data.
///
/// # Errors
/// A path that cannot be read.
pub fn has_split(sources: &[PathBuf], split: Split) -> Result<bool> {
    for source in sources {
        if !source.is_dir() || members(source, split)?.is_empty() {
            return Ok(false);
        }
    }
    Ok(!sources.is_empty())
}

/// Files named `<stem>.<anything>` in `folder`, sorted by name.
fn members(folder: &Path, split: Split) -> Result<Vec<PathBuf>> {
    let failed = |cause| Error::reading(folder, &cause);
    let mut members = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.split_once('.').is_some_and(|(stem, _)| stem == split.stem()) && path.is_file() {
            members.push(path);
        }
    }
    members.sort();
    Ok(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        names.iter().for_each(|name| fs::write(folder.path().join(name), "x").unwrap());
        folder
    }

    fn names(files: &[PathBuf]) -> Vec<String> {
        files.iter().map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_folder_gives_the_files_of_the_split() {
        let folder = folder(&["train.txt", "train.jsonl", "valid.txt", "training.txt", "README.md"]);
        let sources = [folder.path().to_owned()];
        assert_eq!(names(&files(&sources, Split::Train).unwrap()), ["train.jsonl", "train.txt"]);
        assert_eq!(names(&files(&sources, Split::Valid).unwrap()), ["valid.txt"]);
        let error = files(&sources, Split::Test).unwrap_err().to_string();
        assert!(error.contains(": holds no test.txt or test.jsonl; "), "{error}");
        assert!(has_split(&sources, Split::Valid).unwrap());
        assert!(!has_split(&sources, Split::Test).unwrap());
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
    fn other_extensions_are_refused_by_name() {
        let folder = folder(&["train.csv", "train.txt"]);
        let error = files(&[folder.path().to_owned()], Split::Train).unwrap_err().to_string();
        assert!(error.contains("train.csv: .csv files are not read"), "{error}");
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
