//! Files and folders that are either the old ones or the new ones, never something in between.
//!
//! The new bytes go to a temporary neighbour, are synced, and take the old place in one step; the
//! parent folder is synced after it. On an error the old file stays and the temporary one is removed.
//! Modes follow the umask, as if the program had created the file plainly (a temporary file made by
//! the usual means would stay at 0600).

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use tempfile::{Builder, TempDir};

use crate::unfinished;

/// A file or folder that cannot be written. The message is a sentence for the user.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written: {cause}; {}", .path.display(), remedy(.cause))]
pub struct WriteError {
    /// The file or folder that cannot be written.
    pub path: PathBuf,
    /// Why, in the system's words.
    pub cause: io::Error,
}

impl WriteError {
    /// `cause`, which the system gave for `path`.
    pub fn new(path: &Path, cause: io::Error) -> Self {
        Self { path: path.to_owned(), cause }
    }
}

/// What to do about a file that cannot be written.
pub fn remedy(cause: &io::Error) -> &'static str {
    match cause.kind() {
        _ if is_limit(cause) => "raise the limit of open files (`ulimit -n`)",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "choose a folder that you may write to"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free space or choose another folder"
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            "check the path"
        }
        _ => "choose another folder",
    }
}

/// Whether the process or the system has no more file descriptors: `EMFILE` and `ENFILE`, which have the same
/// numbers on every Unix.
pub fn is_limit(cause: &io::Error) -> bool {
    let is_number = |number: i32| matches!(number, 23 | 24);
    // The number of an error that tempfile passes on with a path is in its text alone.
    let in_text =
        || [23, 24].iter().any(|number| cause.to_string().contains(&format!("(os error {number})")));
    cfg!(unix) && cause.raw_os_error().map_or_else(in_text, is_number)
}

/// `Result` with [`WriteError`].
pub type Result<T, E = WriteError> = std::result::Result<T, E>;

/// Bytes that wait before they go to a file.
pub const BUFFER: usize = 1 << 20;

/// Replaces a file atomically: a crash leaves the old file or the new one.
///
/// # Errors
/// [`WriteError`] if any step fails; the old file is then untouched.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    write_with(path, |out| out.write_all(bytes))
}

/// Writes a file atomically with the bytes that `fill` writes; see [`write()`].
///
/// # Errors
/// [`WriteError`] if `fill` or any step fails; the old file is then untouched.
pub fn write_with(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    replace_file(path, fill).map_err(|cause| WriteError::new(path, cause))
}

fn replace_file(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let folder = parent(path);
    let (temporary, _unfinished) =
        unfinished::file(|| builder(0o666).tempfile_in(&folder), |made| made.path().to_owned())?;
    write_and_sync(temporary.as_file(), fill)?;
    temporary.persist(path).map_err(|error| error.error)?;
    sync_folder(&folder)
}

/// Whether [`write()`] could put a file at `path` now.
///
/// # Errors
/// [`WriteError`] when `path` is a folder, its own folder is missing, or one may not write there.
pub fn check(path: &Path) -> Result<()> {
    let failed = |cause| WriteError::new(path, cause);
    if path.is_dir() {
        return Err(failed(io::Error::from(io::ErrorKind::IsADirectory)));
    }
    let make = || builder(0o666).tempfile_in(parent(path));
    unfinished::file(make, |made| made.path().to_owned()).map(drop).map_err(failed)
}

/// Creates a new file, lets `fill` write it, and syncs it. Not atomic: for folders not yet in place.
///
/// # Errors
/// [`WriteError`] if any step fails.
pub fn create(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let written = File::create_new(path).and_then(|file| write_and_sync(&file, fill));
    written.map_err(|cause| WriteError::new(path, cause))
}

fn write_and_sync(file: &File, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER, file);
    fill(&mut out)?;
    out.flush()?;
    file.sync_all()
}

/// Replaces a folder, or makes it, with what `fill` puts into a fresh one.
///
/// Entries of the old folder whose names are not in `owned` are kept. On Linux the two folders are
/// exchanged in one step; elsewhere, and on file systems that cannot, there is a moment between two
/// renames.
///
/// # Errors
/// The error of `fill`, or [`WriteError`]; the old folder is then still in place.
pub fn replace_folder(path: &Path, owned: &[&str], fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let failed = |cause| WriteError::new(path, cause);
    // A link to a folder stays a link: what it points to is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = parent(&path);
    fs::create_dir_all(&folder).map_err(failed)?;
    let fresh = builder(0o777).tempdir_in(&folder).map_err(failed)?;
    fill(fresh.path()).map_err(|error| in_place_of(error, fresh.path(), &path))?;
    put_in_place(&path, owned, fresh).and_then(|()| sync_folder(&folder)).map_err(failed)
}

/// The same error with the path the user knows, not that of the temporary folder.
fn in_place_of(error: WriteError, fresh: &Path, path: &Path) -> WriteError {
    let inner = error.path.strip_prefix(fresh).map(|inner| path.join(inner));
    WriteError { path: inner.unwrap_or(error.path), cause: error.cause }
}

fn put_in_place(path: &Path, owned: &[&str], fresh: TempDir) -> io::Result<()> {
    sync_folder(fresh.path())?;
    if !path.try_exists()? {
        fs::rename(fresh.path(), path)?;
        let _ = fresh.keep(); // moved: nothing is left to remove
        return Ok(());
    }
    if !path.is_dir() {
        return Err(io::Error::from(io::ErrorKind::NotADirectory));
    }
    keep_files(path, owned, fresh.path())?;
    exchange(fresh.path(), path)?;
    // `fresh` now names the old folder and is removed on return. Folders in it can only move.
    for entry in fs::read_dir(fresh.path())? {
        let entry = entry?;
        if !is_owned(&entry, owned) && entry.file_type()?.is_dir() {
            fs::rename(entry.path(), path.join(entry.file_name()))?;
        }
    }
    sync_folder(path)
}

fn is_owned(entry: &fs::DirEntry, owned: &[&str]) -> bool {
    owned.iter().any(|&owned| entry.file_name() == owned)
}

/// Puts the files in `path` that are not `owned` into `fresh` too: a process that ends between the exchange and its
/// end then loses none of them.
fn keep_files(path: &Path, owned: &[&str], fresh: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let kept = fresh.join(entry.file_name());
        if is_owned(&entry, owned) || entry.file_type()?.is_dir() {
            continue;
        }
        // Not every file system has hard links.
        if fs::hard_link(entry.path(), &kept).is_err() {
            fs::copy(entry.path(), kept)?;
        }
    }
    Ok(())
}

#[cfg(target_os = "linux")]
fn exchange(fresh: &Path, path: &Path) -> io::Result<()> {
    use rustix::{
        fs::{CWD, RenameFlags, renameat_with},
        io::Errno,
    };
    match renameat_with(CWD, fresh, CWD, path, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => exchange_in_steps(fresh, path),
        done => Ok(done?),
    }
}

#[cfg(not(target_os = "linux"))]
fn exchange(fresh: &Path, path: &Path) -> io::Result<()> {
    exchange_in_steps(fresh, path)
}

fn exchange_in_steps(fresh: &Path, path: &Path) -> io::Result<()> {
    let aside = fresh.with_extension("old");
    fs::rename(path, &aside)?;
    if let Err(error) = fs::rename(fresh, path) {
        fs::rename(&aside, path)?;
        return Err(error);
    }
    fs::rename(aside, fresh)
}

/// Makes renames and new names in a folder last through a loss of power.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Names like `.engraft-x8Kq2.tmp`; the umask takes its bits from `mode`.
fn builder(mode: u32) -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(".engraft-").suffix(".tmp");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
    builder
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, b"old").unwrap();
        let error = write_with(&path, |out| {
            out.write_all(b"new")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        })
        .unwrap_err();
        assert!(error.to_string().contains("file: cannot be written"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["file"]);
        write(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[test]
    fn a_missing_right_is_no_lack_of_space() {
        let error = |kind| WriteError::new(Path::new("x"), io::Error::from(kind)).to_string();
        assert!(error(io::ErrorKind::PermissionDenied).ends_with("; choose a folder that you may write to"));
        assert!(error(io::ErrorKind::StorageFull).ends_with("; free space or choose another folder"));
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let error = write(&folder.path().join("none/file"), b"x").unwrap_err();
        assert!(error.path.ends_with("none/file"));
    }

    #[test]
    fn a_place_is_checked_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&at("old"), b"old").unwrap();
        fs::create_dir(at("folder")).unwrap();
        assert!(check(&at("new")).is_ok() && check(&at("old")).is_ok());
        assert!(check(&at("none/new")).unwrap_err().path.ends_with("none/new"));
        assert_eq!(check(&at("folder")).unwrap_err().cause.kind(), io::ErrorKind::IsADirectory);
        assert_eq!(names(folder.path()), ["folder", "old"]);
        assert_eq!(fs::read(at("old")).unwrap(), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn modes_are_those_of_a_plainly_created_file() {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        File::create(at("plain")).unwrap();
        fs::create_dir(at("plain-folder")).unwrap();
        write(&at("file"), b"x").unwrap();
        replace_folder(&at("folder"), &[], |fresh| create(&fresh.join("inner"), |_| Ok(()))).unwrap();
        assert_eq!(mode(&at("file")), mode(&at("plain")));
        assert_eq!(mode(&at("folder")), mode(&at("plain-folder")));
        assert_eq!(mode(&at("folder/inner")), mode(&at("plain")));
    }

    #[test]
    fn a_folder_is_replaced_and_what_is_not_ours_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/adapter");
        let put = |name: &'static str, bytes: &'static [u8]| {
            replace_folder(&path, &["a", "b"], |fresh| create(&fresh.join(name), |out| out.write_all(bytes)))
        };
        put("a", b"1").unwrap();
        fs::write(path.join("README.md"), "kept").unwrap();
        fs::create_dir_all(path.join("notes/of")).unwrap();
        put("b", b"2").unwrap();
        assert_eq!(names(&path), ["README.md", "b", "notes"]);
        assert_eq!(names(&path.join("notes")), ["of"]);
        fs::remove_dir_all(path.join("notes")).unwrap();
        // Also the new folder has the file before it takes the place of the old one.
        fs::create_dir(folder.path().join("fresh")).unwrap();
        keep_files(&path, &["b"], &folder.path().join("fresh")).unwrap();
        assert_eq!(fs::read(folder.path().join("fresh/README.md")).unwrap(), b"kept");
        assert_eq!(names(&folder.path().join("fresh")), ["README.md"]);
        let failed = replace_folder(&path, &["b"], |fresh| {
            create(&fresh.join("c"), |_| Err(io::Error::from(io::ErrorKind::StorageFull)))
        });
        assert!(failed.unwrap_err().to_string().contains("deep/adapter/c: cannot"));
        assert_eq!(names(&path), ["README.md", "b"]);
        assert_eq!(names(path.parent().unwrap()), ["adapter"]);
    }

    #[test]
    fn the_fallback_of_two_renames_exchanges_too() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("fresh/new")).unwrap();
        fs::create_dir_all(at("place/old")).unwrap();
        exchange_in_steps(&at("fresh"), &at("place")).unwrap();
        assert_eq!((names(&at("fresh")), names(&at("place"))), (vec!["old".into()], vec!["new".into()]));
        assert_eq!(names(folder.path()), ["fresh", "place"]);
    }
}
