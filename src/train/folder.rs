//! The run folder: who may write into it, and where its files are.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
};

use engraft_util::{
    atomic, shell,
    unfinished::{self, Unfinished},
};
use toml::Table;

use super::save;
use crate::{
    error::{Error, Result},
    saved,
};

const LOCK: &str = "lock";
const CONFIG: &str = "config.toml";

/// The key of `config.toml` that says that engraft wrote it; its value is the program's version.
pub const MARKER: &str = "engraft";

/// A run folder, locked from the start and until dropped. What was made of it goes again, unless the run begins.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    resume: bool,
    /// The system lets go of the lock when the process ends, however it ends.
    lock: Option<File>,
    /// What this process made here, in order; empty once the run has begun.
    made: Vec<(Made, Unfinished)>,
}

#[derive(Debug)]
enum Made {
    Folder(PathBuf),
    Lock(PathBuf),
}

/// Why a run may not have a folder.
enum Refusal {
    /// Something is there, or another process has it.
    Taken(Error),
    /// It would fail elsewhere too.
    Other(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let (Refusal::Taken(error) | Refusal::Other(error)) = refusal;
        error
    }
}

impl RunFolder {
    /// The folder `path` for a new run, made and locked; with `resume` for the run that is in it.
    ///
    /// # Errors
    /// When it is no folder or cannot be written, is in use, holds something although `resume` is off, or no
    /// run although it is on.
    pub fn look(path: &Path, resume: bool) -> Result<Self> {
        if !resume {
            return Ok(Self::fresh(path)?);
        }
        check_run(path)?;
        let mut folder = Self { path: path.to_owned(), resume, lock: None, made: Vec::new() };
        folder.lock()?;
        Ok(folder)
    }

    /// The first of `stem`, `stem-2`, `stem-3` .. in `parent` that is free for a new run. Processes that start
    /// at the same time get different ones.
    ///
    /// # Errors
    /// When none can be made.
    pub fn first_free(parent: &Path, stem: &str) -> Result<Self> {
        let mut number = 1u64;
        loop {
            let name = if number == 1 { stem.to_owned() } else { format!("{stem}-{number}") };
            match Self::fresh(&parent.join(name)) {
                Ok(folder) => return Ok(folder),
                Err(Refusal::Taken(_)) => number += 1,
                Err(Refusal::Other(error)) => return Err(error),
            }
        }
    }

    /// The folder `path`, which a run of another process has not.
    fn fresh(path: &Path) -> Result<Self, Refusal> {
        let mut folder = Self { path: path.to_owned(), resume: false, lock: None, made: Vec::new() };
        match fs::metadata(path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => folder.make()?,
            Err(cause) => return Err(folder.not_made(&cause).into()),
            Ok(found) if !found.is_dir() => {
                return Err(Refusal::Taken(Error::input(format!(
                    "--output {}: is a file; name a folder that is empty or does not exist",
                    path.display()
                ))));
            }
            Ok(_) => folder.refuse_contents()?,
        }
        folder.lock()?;
        // Another process may have trained here between the two.
        folder.refuse_contents()?;
        Ok(folder)
    }

    /// Makes the folder, and those around it that are missing.
    fn make(&mut self) -> Result<(), Refusal> {
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<&Path> = self.path.ancestors().take_while(missing).collect();
        for path in missing.into_iter().rev() {
            match unfinished::folder(path) {
                Ok(note) => self.made.push((Made::Folder(path.to_owned()), note)),
                // Another process was faster; the lock decides which one has it.
                Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
                Err(cause) => return Err(self.not_made(&cause).into()),
            }
        }
        Ok(())
    }

    /// Makes the folder the run's for good, and removes what a killed run left unfinished.
    ///
    /// # Errors
    /// When it cannot be written, or has been filled since [`RunFolder::look`].
    pub fn claim(&mut self) -> Result<()> {
        if !self.resume {
            self.refuse_contents()?;
        }
        fs::create_dir_all(self.saves()).map_err(|cause| self.not_made(&cause))?;
        self.made.clear();
        clean_run(&self.path).map_err(|cause| Error::writing(&self.path, &cause))
    }

    /// Writes `config.toml`, unless it says the same already.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_config(&self, text: &str) -> Result<()> {
        let path = config_path(&self.path);
        if fs::read_to_string(&path).is_ok_and(|old| old == text) {
            return Ok(());
        }
        Ok(atomic::write(&path, text.as_bytes())?)
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the saves.
    pub fn saves(&self) -> PathBuf {
        saves(&self.path)
    }

    /// The folder of the finished adapter.
    pub fn adapter(&self) -> PathBuf {
        self.path.join("adapter")
    }

    /// The folder of the adapter with the lowest evaluation loss.
    pub fn best(&self) -> PathBuf {
        self.path.join("best")
    }

    /// The command that goes on with the run of this folder, for a shell.
    pub fn resume_command(&self) -> String {
        format!("engraft train --resume --output {}", shell::word(&self.path.display().to_string()))
    }

    fn lock(&mut self) -> Result<(), Refusal> {
        let path = self.path.join(LOCK);
        loop {
            let file = self.open_lock(&path)?;
            match file.try_lock() {
                Ok(()) => self.lock = Some(file),
                Err(TryLockError::WouldBlock) => {
                    return Err(Refusal::Taken(Error::input(format!(
                        "--output {}: another process is training in this folder; wait for it or choose another folder",
                        self.path.display()
                    ))));
                }
                // A file system without locks: then there is nothing to hold.
                Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => {
                    self.lock = Some(file)
                }
                Err(TryLockError::Error(cause)) => return Err(Error::writing(&path, &cause).into()),
            }
            // A process that gives the folder up removes its lock file: a lock on that one holds nothing.
            if self.lock.as_ref().is_some_and(|file| is_at(file, &path)) {
                return Ok(());
            }
            self.lock = None;
        }
    }

    fn open_lock(&mut self, path: &Path) -> Result<File, Refusal> {
        let mut options = OpenOptions::new();
        options.append(true);
        let make = || options.clone().create_new(true).open(path);
        match unfinished::file(make, |_| path.to_owned()) {
            Ok((file, note)) => {
                self.made.push((Made::Lock(path.to_owned()), note));
                Ok(file)
            }
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {
                // Or made again, if another process removed it meanwhile.
                let opened = options.create(true).open(path);
                opened.map_err(|cause| self.not_made(&cause).into())
            }
            Err(cause) => Err(self.not_made(&cause).into()),
        }
    }

    /// A lock file, empty folders, and files that were never finished are what a run that never began leaves.
    fn refuse_contents(&self) -> Result<(), Refusal> {
        let unreadable = |cause: io::Error| Error::reading(&self.path, &cause);
        for entry in fs::read_dir(&self.path).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name();
            let is_ours = name == LOCK
                || is_unfinished(&name.to_string_lossy())
                || is_empty_folder(&entry).map_err(unreadable)?;
            if is_ours {
                continue;
            }
            let resume =
                if check_run(&self.path).is_ok() { ", or add --resume to go on with its run" } else { "" };
            return Err(Refusal::Taken(Error::input(format!(
                "--output {}: is not empty, it holds {name:?}; choose another folder{resume}",
                self.path.display()
            ))));
        }
        Ok(())
    }

    fn not_made(&self, cause: &io::Error) -> Error {
        if cause.kind() == io::ErrorKind::StorageFull || atomic::is_limit(cause) {
            return Error::writing(&self.path, cause);
        }
        Error::input(format!(
            "--output {}: cannot be written: {cause}; choose a folder you may write to",
            self.path.display()
        ))
    }
}

impl Drop for RunFolder {
    /// Takes back what was made for a run that never began.
    fn drop(&mut self) {
        for (made, _note) in self.made.drain(..).rev() {
            // A folder that somebody put something into stays.
            let _ = match made {
                Made::Folder(path) => fs::remove_dir(path),
                Made::Lock(path) => fs::remove_file(path),
            };
        }
    }
}

/// Refuses a folder that holds no run that engraft wrote: its config has [`MARKER`], or, from before there was
/// one, it holds a good save.
///
/// # Errors
/// [`Error::Input`] that names `--output`.
pub fn check_run(path: &Path) -> Result<()> {
    let refuse = |fault: &str| {
        Err(Error::input(format!(
            "--output {}: {fault}, so there is no run to resume; check the name, or leave --resume out and name a \
             new folder",
            path.display()
        )))
    };
    match fs::metadata(path) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return refuse("does not exist"),
        Err(cause) => return refuse(&format!("cannot be read ({cause})")),
        Ok(found) if !found.is_dir() => return refuse("is a file"),
        Ok(_) => {}
    }
    let text = fs::read_to_string(config_path(path)).unwrap_or_default();
    let is_ours = toml::from_str::<Table>(&text).is_ok_and(|config| config.contains_key(MARKER));
    if is_ours || matches!(save::newest(&saves(path)), Ok(Some(_))) {
        return Ok(());
    }
    refuse("is no folder that engraft trains in")
}

/// Whether a process trains in `folder` now.
pub fn is_in_use(folder: &Path) -> bool {
    let held = |file: File| matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    File::open(folder.join(LOCK)).is_ok_and(held)
}

/// The config of the run in `folder`.
pub fn config_path(folder: &Path) -> PathBuf {
    folder.join(CONFIG)
}

/// The folder of the saves of the run in `folder`.
pub fn saves(folder: &Path) -> PathBuf {
    folder.join(saved::FOLDER)
}

/// Whether `file` is what `path` names now.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |found: fs::Metadata| (found.dev(), found.ino());
    file.metadata().and_then(|held| Ok(id(held) == id(fs::metadata(path)?))).unwrap_or(false)
}

/// Where an open file cannot be removed there is no other.
#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

/// Folders of a run folder that files are replaced in.
const FOLDERS: [&str; 3] = ["adapter", "best", "saves"];

/// Removes the temporary files and folders of a process that was killed while it wrote in the run folder `path`.
fn clean_run(path: &Path) -> io::Result<()> {
    clean(path)?;
    for folder in FOLDERS.map(|name| path.join(name)).iter().filter(|folder| folder.is_dir()) {
        clean(folder)?;
        // An adapter of several methods has a folder for each.
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                clean(&entry.path())?;
            }
        }
    }
    Ok(())
}

/// Removes temporary files and folders in `folder` itself.
fn clean(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !is_unfinished(&entry.file_name().to_string_lossy()) {
            continue;
        }
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Whether a file or folder of this name is one that was being written.
fn is_unfinished(name: &str) -> bool {
    name.starts_with(".engraft-") && (name.ends_with(".tmp") || name.ends_with(".old"))
}

fn is_empty_folder(entry: &fs::DirEntry) -> io::Result<bool> {
    Ok(entry.file_type()?.is_dir() && fs::read_dir(entry.path())?.next().is_none())
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
    fn a_folder_belongs_to_one_run() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let mut first = RunFolder::look(&path, false).unwrap();
        let second = RunFolder::look(&path, false);
        assert!(second.unwrap_err().to_string().contains("another process"));
        first.claim().unwrap();
        first.write_config("engraft = '1'\nseed = 1\n").unwrap();
        assert!(RunFolder::look(&path, true).unwrap_err().to_string().contains("another process"));
        drop(first);
        assert!(RunFolder::look(&path, false).unwrap_err().to_string().contains("add --resume"));
        // Left by a run that was killed while it replaced its adapter's tensors.
        let unfinished = path.join("adapter/prefix/.engraft-x.tmp");
        fs::create_dir_all(path.join("adapter/prefix")).unwrap();
        fs::write(&unfinished, "x").unwrap();
        RunFolder::look(&path, true).unwrap().claim().unwrap();
        assert!(!unfinished.exists());
    }

    #[test]
    fn a_run_that_never_began_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        drop(RunFolder::look(&root.path().join("a/b/run"), false).unwrap());
        assert!(names(root.path()).is_empty(), "{:?}", names(root.path()));
        fs::create_dir(root.path().join("empty")).unwrap();
        drop(RunFolder::look(&root.path().join("empty"), false).unwrap());
        assert!(names(&root.path().join("empty")).is_empty());
        let folder = RunFolder::look(&root.path().join("a/b/run"), false).unwrap();
        fs::write(root.path().join("a/mine"), "x").unwrap();
        drop(folder);
        assert_eq!(
            (names(root.path()), names(&root.path().join("a"))),
            (vec!["a".into(), "empty".into()], vec!["mine".into()])
        );
    }

    #[test]
    fn a_folder_in_which_nothing_began_is_free() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        RunFolder::look(&path, false).unwrap().claim().unwrap();
        fs::write(path.join(".engraft-x.tmp"), "x").unwrap();
        RunFolder::look(&path, false).unwrap().claim().unwrap();
        assert_eq!(names(&path), ["lock", "saves"]);
        assert!(RunFolder::look(&path, true).unwrap_err().to_string().contains("no run to resume"));
    }

    #[test]
    fn the_first_free_name_is_held_at_once() {
        let root = tempfile::tempdir().unwrap();
        let parent = root.path().join("runs");
        fs::create_dir(&parent).unwrap();
        fs::write(parent.join("x-2"), "a file").unwrap();
        let all: Vec<RunFolder> = (0..3).map(|_| RunFolder::first_free(&parent, "x").unwrap()).collect();
        let names: Vec<_> = all.iter().map(|folder| folder.path().file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["x", "x-3", "x-4"]);
        drop(all);
        assert_eq!(RunFolder::first_free(&parent, "x").unwrap().path(), parent.join("x"));
        let file = parent.join("x-2/deeper");
        assert_eq!(RunFolder::first_free(&file, "x").unwrap_err().exit_code(), 2);
    }

    #[test]
    fn a_lock_file_that_was_removed_holds_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (first, second) = (root.path().join("lock"), root.path().join("other"));
        let held = File::create(&first).unwrap();
        assert!(is_at(&held, &first));
        fs::remove_file(&first).unwrap();
        assert!(!is_at(&held, &first));
        // The same name, another file.
        fs::write(&second, "").unwrap();
        fs::rename(&second, &first).unwrap();
        assert!(!is_at(&held, &first));
    }

    #[test]
    fn cleaning_spares_what_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at(".engraft-abc.tmp"), "x").unwrap();
        fs::create_dir_all(at(".engraft-def.tmp/inside")).unwrap();
        fs::write(at("step-1.safetensors"), "x").unwrap();
        clean(folder.path()).unwrap();
        assert_eq!(names(folder.path()), ["step-1.safetensors"]);
    }

    #[test]
    fn a_file_is_no_run_folder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for resume in [false, true] {
            let error = RunFolder::look(file.path(), resume).unwrap_err();
            assert!(error.to_string().contains("is a file") && error.exit_code() == 2);
        }
    }
}
