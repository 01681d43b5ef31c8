//! The formats of data files: which extension means what, and how a file is opened.
//!
//! A format is a variant of [`Kind`] with its row in `FORMATS` and its way to split a text into records in
//! `split`; a compression is a row of `COMPRESSIONS`.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    sync::{Arc, atomic::AtomicU64},
};

use super::{sources::Counted, zstd::Zstd};
use crate::error::{Error, Result};

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Text: one document, or one a line.
    Text,
    /// One JSON object a line.
    Jsonl,
    /// An array of JSON objects, or objects one after the other.
    Json,
    /// Comma-separated values; the first line names the columns.
    Csv,
    /// Tab-separated values; the first line names the columns.
    Tsv,
    /// Parquet: columns, in a build with the feature `parquet`. Its rows are read as lines of JSON.
    Parquet,
}

/// The extension of each format, in lower case.
const FORMATS: [(Kind, &str); 6] = [
    (Kind::Text, "txt"),
    (Kind::Jsonl, "jsonl"),
    (Kind::Json, "json"),
    (Kind::Csv, "csv"),
    (Kind::Tsv, "tsv"),
    (Kind::Parquet, "parquet"),
];

/// Opens the content of a compressed file.
type Unpack = fn(Box<dyn Read + Send>) -> Box<dyn Read + Send>;

/// Extension, the bytes that a file of it begins with, and the reader of its content.
const COMPRESSIONS: [(&str, &[u8], Unpack); 2] = [
    ("gz", &[0x1f, 0x8b], |from| Box::new(flate2::read::MultiGzDecoder::new(from))),
    ("zst", &[0x28, 0xb5, 0x2f, 0xfd], |from| Box::new(Zstd::new(from))),
];

impl Kind {
    /// The format of `path` by its extension, in any case; that of a compression is skipped.
    ///
    /// # Errors
    /// Any other extension, by name.
    pub fn of(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let plain = compression(&name).map_or(&name[..], |(rest, _)| rest);
        let extension =
            Path::new(plain).extension().map(|extension| extension.to_string_lossy().into_owned());
        let known = |extension: &str| FORMATS.iter().find(|(_, known)| *known == extension);
        match extension {
            None => Err(Error::input(format!(
                "{}: has no extension to tell its format; name it {}, or give --data-format",
                path.display(),
                extensions()
            ))),
            Some(extension) => known(&extension).map(|(kind, _)| *kind).ok_or_else(|| {
                Error::input(format!(
                    "{}: .{extension} files are not read; convert it to {}, or give --data-format",
                    path.display(),
                    extensions()
                ))
            }),
        }
    }

    /// The format called `name`, its extension.
    pub fn named(name: &str) -> Option<Self> {
        FORMATS.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }

    /// The format's extension.
    pub fn name(self) -> &'static str {
        FORMATS.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }

    /// The extensions of all formats that this build reads.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let read = |kind: Kind| kind != Kind::Parquet || cfg!(feature = "parquet");
        FORMATS.iter().filter(move |(kind, _)| read(*kind)).map(|(_, name)| *name)
    }

    /// The format of an unnamed text by its first characters: JSON objects or an array of them, else text.
    pub fn sniffed(beginning: &[u8]) -> Self {
        let text = beginning.strip_prefix("\u{feff}".as_bytes()).unwrap_or(beginning);
        match text.trim_ascii_start().first() {
            Some(b'{' | b'[') => Self::Json,
            _ => Self::Text,
        }
    }
}

/// `.txt, .jsonl .. or .tsv`: what this build reads.
pub(super) fn extensions() -> String {
    let names: Vec<String> = Kind::names().map(|name| format!(".{name}")).collect();
    match names.split_last() {
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

/// `name` without the extension of its compression, and how to unpack it.
fn compression(name: &str) -> Option<(&str, Unpack)> {
    let stripped = |(extension, _, unpack): &(&str, &[u8], Unpack)| {
        Some((name.strip_suffix(extension)?.strip_suffix('.')?, *unpack))
    };
    COMPRESSIONS.iter().find_map(stripped)
}

/// Whether the file's name ends as that of a compressed file.
pub(super) fn is_compressed(path: &Path) -> bool {
    compression(&path.file_name().unwrap_or_default().to_string_lossy().to_lowercase()).is_some()
}

/// The content of the file at `path`, unpacked if its name ends as that of a compressed file; `counter` counts the
/// bytes of the file.
///
/// # Errors
/// When it cannot be opened.
pub(super) fn open(path: &Path, counter: Arc<AtomicU64>) -> Result<Box<dyn Read + Send>> {
    let file = File::open(path).map_err(|cause| Error::reading(path, &cause))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let file: Box<dyn Read + Send> = Box::new(Counted { from: file, counter });
    Ok(match compression(&name) {
        None => file,
        Some((_, unpack)) => unpack(Box::new(io::BufReader::new(file))),
    })
}

/// The rows of the Parquet file at `path` as lines of JSON; `counter` counts up to the bytes of the file.
///
/// # Errors
/// When it cannot be opened or is none, is packed once more, or this build reads no Parquet.
pub(super) fn open_rows(path: &Path, counter: Arc<AtomicU64>) -> Result<Box<dyn Read + Send>> {
    if is_compressed(path) {
        return Err(Error::input(format!(
            "{}: a Parquet file is compressed inside and is not packed once more; unpack it",
            path.display()
        )));
    }
    #[cfg(feature = "parquet")]
    return super::parquet::open(path, counter);
    #[cfg(not(feature = "parquet"))]
    {
        drop(counter);
        Err(Error::input(format!(
            "{}: this program was built without Parquet; build it with `cargo build --release --features parquet`, \
             or convert the file to .jsonl",
            path.display()
        )))
    }
}

/// Bytes of an unnamed stream that are looked at to tell its format.
const BEGINNING: u64 = 4096;

/// The content of a stream without a name, unpacked if it begins as a compressed file does, and its format.
///
/// # Errors
/// When it cannot be read.
pub(super) fn open_unnamed(
    name: &str,
    mut from: Box<dyn Read + Send>,
    format: Option<Kind>,
) -> Result<(Box<dyn Read + Send>, Kind)> {
    let failed = |cause| Error::reading(Path::new(name), &cause);
    let beginning = beginning(&mut from).map_err(failed)?;
    let unpack = COMPRESSIONS.iter().find(|(_, magic, _)| beginning.starts_with(magic));
    let mut whole = joined(beginning.clone(), from);
    let Some((_, _, unpack)) = unpack else {
        return Ok((whole, format.unwrap_or_else(|| Kind::sniffed(&beginning))));
    };
    whole = unpack(Box::new(io::BufReader::new(whole)));
    let inner = self::beginning(&mut whole).map_err(failed)?;
    let kind = format.unwrap_or_else(|| Kind::sniffed(&inner));
    Ok((joined(inner, whole), kind))
}

fn beginning(from: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(BEGINNING).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn joined(beginning: Vec<u8>, rest: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
    Box::new(io::Cursor::new(beginning).chain(rest))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn extensions_tell_the_format() {
        for (name, kind) in [
            ("a/b.txt", Kind::Text),
            ("b.JSONL", Kind::Jsonl),
            ("b.json", Kind::Json),
            ("b.csv", Kind::Csv),
            ("b.tsv", Kind::Tsv),
            ("b.Parquet", Kind::Parquet),
            ("b.jsonl.gz", Kind::Jsonl),
            ("b.Txt.ZST", Kind::Text),
        ] {
            assert_eq!(Kind::of(Path::new(name)).unwrap(), kind, "{name}");
        }
        let refused = |name| Kind::of(Path::new(name)).unwrap_err().to_string();
        assert_eq!(
            refused("a/train.xlsx"),
            format!(
                "a/train.xlsx: .xlsx files are not read; convert it to {}, or give --data-format",
                if cfg!(feature = "parquet") {
                    ".txt, .jsonl, .json, .csv, .tsv or .parquet"
                } else {
                    ".txt, .jsonl, .json, .csv or .tsv"
                }
            )
        );
        assert!(refused("data").starts_with("data: has no extension"));
        assert!(refused("data.gz").starts_with("data.gz: has no extension"));
        assert!(FORMATS.iter().all(|(kind, name)| Kind::named(name) == Some(*kind) && kind.name() == *name));
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text.as_bytes()).unwrap();
        packed.finish().unwrap()
    }

    #[test]
    fn a_stream_tells_its_format_by_its_beginning() {
        for (text, kind) in [
            ("plain", Kind::Text),
            ("\u{feff} \n{\"text\":1}", Kind::Json),
            ("[{}]", Kind::Json),
            ("", Kind::Text),
        ] {
            for bytes in [text.as_bytes().to_vec(), gzip(text)] {
                let (mut from, found) =
                    open_unnamed("standard input", Box::new(io::Cursor::new(bytes)), None).unwrap();
                let mut read = String::new();
                from.read_to_string(&mut read).unwrap();
                assert_eq!((&read[..], found), (text, kind));
            }
        }
        let forced = open_unnamed("-", Box::new(&b"{\"text\":1}"[..]), Some(Kind::Text)).unwrap().1;
        assert_eq!(forced, Kind::Text);
    }

    #[test]
    fn gzip_of_several_members_is_read_whole_and_a_cut_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt.gz");
        let whole = [gzip("one\n"), gzip("two\n")].concat();
        std::fs::write(&path, &whole).unwrap();
        let mut text = String::new();
        open(&path, Arc::default()).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "one\ntwo\n");
        std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        assert!(open(&path, Arc::default()).unwrap().read_to_string(&mut text).is_err());
    }
}
