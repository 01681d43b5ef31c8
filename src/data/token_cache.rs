//! Tokenised rows kept on the disk, so that a second run on the same files starts at once.
//!
//! An entry is found by what its rows depend on: the content of the files, the tokenizer, the options and the program
//! as it was built. Stale rows would be a silent fault, so the content of a file is only taken from a note of an
//! earlier run while nothing about the file has changed since well before that note, down to the time that no
//! copying tool sets back; else it is read and hashed again.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata},
    io::{self, Read},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::{
    dataset::{DataReport, Dataset},
    formats::Kind,
    options::DataOptions,
    sources::DataFile,
    store::Rows,
    tokenizer::Tokenizer,
    weights::Weights,
};
use crate::observe::machine;
use engraft_util::atomic;

/// Changed whenever entries mean something else.
const FORMAT: u32 = 2;

/// Bytes of all entries; the ones that were not used for longest go first.
const MOST_BYTES: u64 = 16 << 30;

/// Extension of the rows, of what is said of them, and of the parts of a split.
const ROWS: &str = "rows";
const ABOUT: &str = "json";

/// Nanoseconds that a file must have been left alone before it was read: clocks of file systems tick in steps.
const SETTLED: u128 = 2_000_000_000;

/// Unfinished files of other processes are removed when they are so old, in seconds.
const ABANDONED: u64 = 24 * 3600;

/// The cache, for one set of files and options.
#[derive(Debug)]
pub(super) struct TokenCache {
    folder: PathBuf,
    /// Name of the entry.
    key: String,
    /// The files as they were when their content was hashed.
    files: Vec<(PathBuf, Stamp)>,
}

/// What the rows of an entry are.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    rows: usize,
    bytes: u64,
    weights: Weights,
    part: Part,
    /// Keys that no form reads, and how many records have them.
    ignored: BTreeMap<String, usize>,
}

/// What is known of rows without reading them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Part {
    pub report: DataReport,
    pub fingerprint: String,
}

/// Everything that says whether a file is the same as before without reading it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    bytes: u64,
    modified: u128,
    /// On Unix; 0 elsewhere.
    changed: i128,
    inode: u64,
    device: u64,
}

/// A note about the content of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    path: PathBuf,
    stamp: Stamp,
    /// When the reading began, in nanoseconds since 1970.
    read_at: u128,
    hash: String,
}

impl TokenCache {
    /// The entry for `files` in the folder of `options`; `None` without such a folder, or where the content of a
    /// file cannot be known before it is read.
    pub(super) fn of(
        files: &[DataFile],
        tokenizer: Option<&Tokenizer>,
        options: &DataOptions,
    ) -> Option<Self> {
        let folder = options.read.token_cache.clone()?;
        fs::create_dir_all(&folder).ok()?;
        let mut hasher = blake3::Hasher::new();
        let tokenizer = tokenizer.map_or("none", Tokenizer::identity);
        hasher.update(
            format!(
                "engraft tokens {FORMAT}, {}\n{tokenizer}\n{:?}\n",
                machine::program(),
                (
                    options.seq_len,
                    options.pack,
                    options.line_by_line,
                    options.train_on_prompt,
                    options.end_of_text,
                    options.vocab,
                    options.prompt,
                    &options.read.keys
                )
            )
            .as_bytes(),
        );
        let mut stamps = Vec::new();
        for file in files {
            if file.is_standard_input() {
                return None;
            }
            let kind = options.read.format.map_or_else(|| Kind::of(&file.path), Ok).ok()?;
            let (stamp, hash) = content(&folder, &file.path).ok()?;
            let unpacked = super::formats::is_compressed(&file.path);
            hasher.update(format!("{hash} {} {unpacked} {}\n", kind.name(), file.weight).as_bytes());
            stamps.push((file.path.clone(), stamp));
        }
        let key = hasher.finalize().to_hex()[..32].to_owned();
        Some(Self { folder, key, files: stamps })
    }

    /// Folder of the entries.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The data of the entry, and the keys that no form reads; `None` if there is no such entry.
    pub(super) fn find(&self, vocab: usize) -> Option<(Dataset, BTreeMap<String, usize>)> {
        let path = self.path(ABOUT);
        let about: About = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
        let rows = Rows::open(&self.path(ROWS), about.rows, about.bytes).ok()?;
        // Entries that are used stay.
        if let Ok(file) = File::options().append(true).open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        let mut data = Dataset::known(rows, about.weights, about.part, vocab);
        data.splits = Some(path);
        Some((data, about.ignored))
    }

    /// Keeps the rows of `data` if they are in a file of this folder, and removes entries that nobody used for long.
    /// Rows of files that changed meanwhile are not kept.
    pub(super) fn keep(&self, data: &mut Dataset, ignored: &BTreeMap<String, usize>) {
        let unchanged = |(path, stamp): &(PathBuf, Stamp)| {
            fs::metadata(path).is_ok_and(|metadata| Stamp::of(&metadata) == *stamp)
        };
        let (all, weights) = data.all();
        let bytes = all.memory().1 as u64;
        if bytes == 0 || bytes > MOST_BYTES || !self.files.iter().all(unchanged) {
            return;
        }
        let part = Part { report: data.report, fingerprint: data.fingerprint.clone() };
        let about = About { rows: all.len(), bytes, weights, part, ignored: ignored.clone() };
        let Ok(text) = serde_json::to_vec(&about) else { return };
        // What is said of rows is written last: without it they are no entry.
        if all.persist(&self.path(ROWS)).is_ok() && atomic::write(&self.path(ABOUT), &text).is_ok() {
            data.splits = Some(self.path(ABOUT));
        }
        prune(&self.folder, MOST_BYTES, &self.key);
    }

    fn path(&self, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", self.key))
    }
}

/// What a split of an entry's rows has, from the file that was written when it was made first.
pub(super) fn split_parts(entry: &Path, fraction: f64, seed: u64) -> Option<[Part; 2]> {
    serde_json::from_slice(&fs::read(split_path(entry, fraction, seed)).ok()?).ok()
}

/// Notes what a split of an entry's rows has.
pub(super) fn note_split(entry: &Path, fraction: f64, seed: u64, parts: &[Part; 2]) {
    if let Ok(text) = serde_json::to_vec(parts) {
        // Without it the rows are hashed again.
        let _ = atomic::write(&split_path(entry, fraction, seed), &text);
    }
}

fn split_path(entry: &Path, fraction: f64, seed: u64) -> PathBuf {
    entry.with_extension(format!("split-{:016x}-{seed}", fraction.to_bits()))
}

/// Removes the least recently used entries until all others have at most `most` bytes, and what no entry owns; never
/// the entry `used`.
fn prune(folder: &Path, most: u64, used: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut groups: BTreeMap<String, (SystemTime, u64, Vec<PathBuf>)> = BTreeMap::new();
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let Some(metadata) = entry.metadata().ok().filter(Metadata::is_file) else { continue };
        let modified = metadata.modified().unwrap_or(UNIX_EPOCH);
        if name.starts_with('.') {
            let age = modified.elapsed().map_or(0, |age| age.as_secs());
            if age > ABANDONED {
                let _ = fs::remove_file(path);
            }
            continue;
        }
        let key = name.split('.').next().unwrap_or_default().to_owned();
        let group = groups.entry(key).or_insert((UNIX_EPOCH, 0, Vec::new()));
        group.0 = group.0.max(modified);
        group.1 += metadata.len();
        group.2.push(path);
    }
    let mut total: u64 = groups.values().map(|(_, bytes, _)| bytes).sum();
    let mut oldest: Vec<_> =
        groups.into_iter().filter(|(key, _)| key != used).map(|(_, group)| group).collect();
    oldest.sort_by_key(|(modified, ..)| *modified);
    for (_, bytes, mut paths) in oldest {
        if total <= most {
            break;
        }
        // What is said of the rows first, so that no entry is ever without its rows.
        paths.sort_by_key(|path| path.extension().is_none_or(|extension| extension != ABOUT));
        paths.iter().for_each(|path| drop(fs::remove_file(path)));
        total -= bytes;
    }
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let mut stamp = Self {
            bytes: metadata.len(),
            modified: modified.unwrap_or_default().as_nanos(),
            changed: 0,
            inode: 0,
            device: 0,
        };
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            stamp.changed = i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec());
            (stamp.inode, stamp.device) = (metadata.ino(), metadata.dev());
        }
        stamp
    }

    /// Whether the file was left alone for long enough before `read_at` that a later change must show in its times.
    fn settled_before(&self, read_at: u128) -> bool {
        let last = self.modified.max(u128::try_from(self.changed).unwrap_or(0));
        last + SETTLED < read_at
    }
}

/// BLAKE3 of the file at `path` in hex, from a note in `folder` if nothing about the file has changed since.
///
/// # Errors
/// When the file cannot be read, or changes while it is.
fn content(folder: &Path, path: &Path) -> io::Result<(Stamp, String)> {
    let path = fs::canonicalize(path)?;
    let stamp = Stamp::of(&fs::metadata(&path)?);
    let notes = folder.join("files");
    let note = notes.join(&blake3::hash(path.as_os_str().as_encoded_bytes()).to_hex()[..32]);
    let known = fs::read(&note).ok().and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok());
    if let Some(known) = known
        && known.path == path
        && known.stamp == stamp
        && stamp.settled_before(known.read_at)
    {
        return Ok((stamp, known.hash));
    }
    let read_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let hash = hash_of(File::open(&path)?)?;
    if Stamp::of(&fs::metadata(&path)?) != stamp {
        return Err(io::Error::other("changed while it was read"));
    }
    let noted = Note { path, stamp: stamp.clone(), read_at, hash: hash.clone() };
    if let Ok(text) = serde_json::to_vec(&noted) {
        // Without the note the file is hashed again.
        let _ = fs::create_dir_all(&notes).map(|()| atomic::write(&note, &text));
    }
    Ok((stamp, hash))
}

/// Bytes that are read and then hashed on all cores.
const TOGETHER: usize = 8 << 20;

fn hash_of(mut file: File) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = Vec::with_capacity(TOGETHER);
    loop {
        bytes.clear();
        if file.by_ref().take(TOGETHER as u64).read_to_end(&mut bytes)? == 0 {
            return Ok(hasher.finalize().to_hex().to_string());
        }
        hasher.update_rayon(&bytes);
    }
}

#[cfg(test)]
#[path = "token_cache_tests.rs"]
mod tests;
