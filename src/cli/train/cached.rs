//! What the caches hold: converted bases, tokens, measured speeds, and the hub's downloads.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::Serialize;

/// A kind of entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Converted bases and their fingerprints.
    Bases,
    /// Tokenised data.
    Tokens,
    /// Measured speeds of this machine.
    Speeds,
    /// Downloads from the hub, shared with other programs.
    Hub,
}

impl CacheKind {
    /// Its name in options and lists.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bases => "bases",
            Self::Tokens => "tokens",
            Self::Speeds => "speeds",
            Self::Hub => "hub",
        }
    }
}

/// Something in a cache that is removed as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// Its kind.
    pub kind: CacheKind,
    /// What it is, for people.
    pub name: String,
    /// Its file or folder.
    pub path: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
    /// When one of its files was last read or written, as far as the file system tells.
    pub used: Option<SystemTime>,
}

impl CacheEntry {
    fn new(kind: CacheKind, name: String, path: PathBuf) -> Self {
        let (mut bytes, mut used) = (0, None);
        visit(&path, &mut |metadata| {
            bytes += metadata.len();
            let times = [metadata.modified().ok(), metadata.accessed().ok()];
            used = times.into_iter().flatten().chain(used).max();
        });
        Self { kind, name, path, bytes, used }
    }

    /// Time since it was last used; zero where that is not known.
    pub fn age(&self) -> Duration {
        self.used.and_then(|used| SystemTime::now().duration_since(used).ok()).unwrap_or_default()
    }

    /// Removes it. What says that a base is complete goes first, so that half an entry is no entry.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn remove(&self) -> io::Result<()> {
        if !self.path.is_dir() {
            return fs::remove_file(&self.path);
        }
        for record in ["fingerprint", "fingerprint-q8", "fingerprint-nf4"] {
            match fs::remove_file(self.path.join(record)) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
                _ => {}
            }
        }
        fs::remove_dir_all(&self.path)
    }

    /// Whether a process is writing it: it holds the lock of a base.
    pub fn is_in_use(&self) -> bool {
        let lock = fs::File::open(self.path.join(".lock"));
        lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock)))
    }
}

/// Everything in the program's `cache` and in the `hub`'s; by kind, the largest first.
pub fn entries(cache: Option<&Path>, hub: Option<&Path>) -> Vec<CacheEntry> {
    let mut found = Vec::new();
    for path in cache.map(children).unwrap_or_default() {
        let name = name_of(&path);
        if path.is_dir() && is_key(&name) {
            found.push(CacheEntry::new(CacheKind::Bases, base_name(&path, &name), path));
        } else if path.is_file() && name.starts_with("calibration") {
            found.push(CacheEntry::new(CacheKind::Speeds, name, path));
        } else if path.is_dir() && name == "tokens" {
            let each = children(&path).into_iter();
            found.extend(each.map(|path| CacheEntry::new(CacheKind::Tokens, name_of(&path), path)));
        }
    }
    for path in hub.map(children).unwrap_or_default() {
        let name = name_of(&path);
        let repository = ["models--", "datasets--"].iter().find_map(|start| name.strip_prefix(start));
        if let Some(repository) = repository.filter(|_| path.is_dir()) {
            found.push(CacheEntry::new(CacheKind::Hub, repository.replace("--", "/"), path));
        }
    }
    found.sort_by(|a, b| (a.kind, b.bytes, &a.name).cmp(&(b.kind, a.bytes, &b.name)));
    found
}

/// Bytes of all `entries`.
pub fn total<'a>(entries: impl IntoIterator<Item = &'a CacheEntry>) -> u64 {
    entries.into_iter().map(|entry| entry.bytes).sum()
}

/// Keys of converted bases are the first 32 digits of a hash.
fn is_key(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The source of a converted base: its id at a commit, its folder, or the beginning of its key.
fn base_name(folder: &Path, key: &str) -> String {
    let Ok(source) = fs::read_to_string(folder.join("source")) else { return key[..12].to_owned() };
    let source = Path::new(source.trim());
    let parts: Vec<&str> = source.iter().filter_map(|part| part.to_str()).collect();
    match parts[..] {
        [.., repository, "snapshots", commit] if repository.starts_with("models--") => {
            let id = repository.trim_start_matches("models--").replace("--", "/");
            format!("{id} at {}", commit.get(..12).unwrap_or(commit))
        }
        _ => source.display().to_string(),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What a folder holds; nothing where it cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// Hands the metadata of every file at or below `path` to `see`; links are not followed.
fn visit(path: &Path, see: &mut dyn FnMut(&fs::Metadata)) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    if metadata.is_dir() {
        children(path).iter().for_each(|child| visit(child, see));
    } else if metadata.is_file() {
        see(&metadata);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_by_their_form() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let key = "0123456789abcdef0123456789abcdef";
        fs::create_dir_all(at(&format!("cache/{key}"))).unwrap();
        fs::write(at(&format!("cache/{key}/model.safetensors")), [0; 100]).unwrap();
        fs::write(at(&format!("cache/{key}/source")), "/x/models--a--b/snapshots/607a30d783dfa663\n")
            .unwrap();
        fs::create_dir_all(at("cache/tokens")).unwrap();
        fs::write(at("cache/tokens/abc"), [0; 10]).unwrap();
        fs::write(at("cache/calibration.json"), [0; 5]).unwrap();
        fs::write(at("cache/mine.txt"), "x").unwrap();
        fs::create_dir_all(at("hub/models--openai-community--gpt2/blobs")).unwrap();
        fs::write(at("hub/models--openai-community--gpt2/blobs/x"), [0; 7]).unwrap();
        fs::create_dir_all(at("hub/.locks")).unwrap();
        let found = entries(Some(&at("cache")), Some(&at("hub")));
        let seen: Vec<_> = found.iter().map(|it| (it.kind.name(), it.name.as_str(), it.bytes)).collect();
        assert_eq!(
            seen,
            [
                ("bases", "a/b at 607a30d783df", 143),
                ("tokens", "abc", 10),
                ("speeds", "calibration.json", 5),
                ("hub", "openai-community/gpt2", 7)
            ]
        );
        found.iter().for_each(|entry| entry.remove().unwrap());
        assert!(entries(Some(&at("cache")), Some(&at("hub"))).is_empty());
        assert!(at("cache/mine.txt").exists());
    }

    #[test]
    fn a_base_that_is_being_written_is_in_use() {
        let root = tempfile::tempdir().unwrap();
        let lock = fs::File::create(root.path().join(".lock")).unwrap();
        let entry = CacheEntry::new(CacheKind::Bases, "x".into(), root.path().into());
        assert!(!entry.is_in_use());
        lock.lock().unwrap();
        assert!(entry.is_in_use());
    }
}
