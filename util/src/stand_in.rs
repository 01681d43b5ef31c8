//! Files that a download left in place of the one that was meant: a pointer of Git LFS, or a page of a web site.

use std::{fmt, fs::File, io::Read, path::Path};

/// What a file is instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandIn {
    /// The text that Git keeps where Git LFS keeps the file.
    LfsPointer,
    /// A page that shows or refuses the file.
    HtmlPage,
}

/// Bytes that tell one.
const START: u64 = 256;

impl StandIn {
    /// What a file that starts with `bytes` is; `None` if it may be what its name says.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let start = String::from_utf8_lossy(&bytes[..bytes.len().min(START as usize)]);
        let start = start.trim_start_matches('\u{feff}').trim_start().to_ascii_lowercase();
        if start.starts_with("version https://git-lfs") {
            Some(Self::LfsPointer)
        } else if ["<!doctype", "<html", "<head"].iter().any(|tag| start.starts_with(tag)) {
            Some(Self::HtmlPage)
        } else {
            None
        }
    }

    /// What the file at `path` is; `None` also where it cannot be read.
    pub fn at(path: &Path) -> Option<Self> {
        let mut start = Vec::new();
        File::open(path).ok()?.take(START).read_to_end(&mut start).ok()?;
        Self::of(&start)
    }
}

/// The end of a sentence that begins with the file, remedy included.
impl fmt::Display for StandIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LfsPointer => {
                "is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder, or download the file"
            }
            Self::HtmlPage => {
                "is an HTML page, not the file itself; download it again, from an address with /resolve/ instead of \
                 /blob/"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_and_pages_are_told_from_files() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n";
        assert_eq!(StandIn::of(pointer), Some(StandIn::LfsPointer));
        assert_eq!(StandIn::of(b"\n<!DOCTYPE html>\n<html>"), Some(StandIn::HtmlPage));
        assert_eq!(StandIn::of(b"<HTML lang=x>"), Some(StandIn::HtmlPage));
        for other in [&b"{\"a\": 1}"[..], b"", b"\x10\0\0\0\0\0\0\0{}", b"PK\x03\x04"] {
            assert_eq!(StandIn::of(other), None);
        }
    }
}
