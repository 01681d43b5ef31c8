//! The run folder: who may write into it, and where its files are.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
};

use engraft_util::atomic;

use crate::{
    error::{Error, Result},
    saved,
};

const LOCK: &str = "lock";
const CONFIG: &str = "config.toml";

/// A run folder. Looked at early, claimed when the run really begins, locked until dropped.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    resume: bool,
    /// The system lets go of the lock when the process ends, however it ends.
    lock: Option<File>,
}

impl RunFolder {
    /// Looks whether a run may use `path`, and locks it if it is there to be resumed.
    ///
    /// # Errors
    /// When it is no folder, holds something although `resume` is off, or is in use.
    pub fn look(path: &Path, resume: bool) -> Result<Self> {
        let mut folder = Self { path: path.to_owned(), resume, lock: None };
        match fs::metadata(path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(Error::reading(path, &cause)),
            Ok(found) if !found.is_dir() => {
                return Err(Error::input(format!(
                    "--output {}: is a file; name a folder that is empty or does not exist",
                    path.display()
                )));
            }
            Ok(_) if resume => folder.lock()?,
            Ok(_) => folder.refuse_contents()?,
        }
        Ok(folder)
    }

    /// Makes the folder if need be, locks it, and removes what a killed run left unfinished.
    ///
    /// # Errors
    /// When it cannot be made, is in use, or has been filled since [`RunFolder::look`].
    pub fn claim(&mut self) -> Result<()> {
        fs::create_dir_all(self.saves()).map_err(|cause| self.not_made(&cause))?;
        if self.lock.is_none() {
            self.lock()?;
        }
        if !self.resume {
            self.refuse_contents()?;
        }
        // Tensor files of an adapter are replaced by a neighbour of their own.
        let adapter = self.adapter();
        [self.path.clone(), self.saves(), adapter.join("lora"), adapter.join("prefix"), adapter]
            .iter()
            .filter(|folder| folder.is_dir())
            .try_for_each(|folder| clean(folder).map_err(|cause| Error::writing(folder, &cause)))
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
        self.path.join(saved::FOLDER)
    }

    /// The folder of the finished adapter.
    pub fn adapter(&self) -> PathBuf {
        self.path.join("adapter")
    }

    /// The folder of the adapter with the lowest evaluation loss.
    pub fn best(&self) -> PathBuf {
        self.path.join("best")
    }

    fn lock(&mut self) -> Result<()> {
        let path = self.path.join(LOCK);
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|cause| self.not_made(&cause))?;
        match file.try_lock() {
            Ok(()) => self.lock = Some(file),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::input(format!(
                    "--output {}: another process is training in this folder; wait for it or choose another folder",
                    self.path.display()
                )));
            }
            // A file system without locks: then there is nothing to hold.
            Err(TryLockError::Error(cause)) if cause.kind() == io::ErrorKind::Unsupported => {
                self.lock = Some(file)
            }
            Err(TryLockError::Error(cause)) => return Err(Error::writing(&path, &cause)),
        }
        Ok(())
    }

    /// A lock file alone, and an empty folder for saves, are what a run that never began leaves.
    fn refuse_contents(&self) -> Result<()> {
        let unreadable = |cause: io::Error| Error::reading(&self.path, &cause);
        for entry in fs::read_dir(&self.path).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let ours = entry.file_name() == LOCK || is_empty_folder(&entry.path());
            if !ours {
                return Err(Error::input(format!(
                    "--output {}: is not empty, it holds {:?}; choose another folder, or add --resume to go on with its run",
                    self.path.display(),
                    entry.file_name()
                )));
            }
        }
        Ok(())
    }

    fn not_made(&self, cause: &io::Error) -> Error {
        if cause.kind() == io::ErrorKind::StorageFull {
            return Error::writing(&self.path, cause);
        }
        Error::input(format!(
            "--output {}: cannot be written: {cause}; choose a folder you may write to",
            self.path.display()
        ))
    }
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

/// `stem`, `stem-2`, `stem-3` ..: the first that is free for a new run.
pub fn free_name(parent: &Path, stem: &str) -> PathBuf {
    let first = std::iter::once(parent.join(stem));
    let further = (2u64..).map(|number| parent.join(format!("{stem}-{number}")));
    first.chain(further).find(|path| !path.exists() || is_empty_folder(path)).unwrap_or_default()
}

/// Removes the temporary files and folders of a process that was killed while it wrote.
fn clean(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with(".engraft-") || !(name.ends_with(".tmp") || name.ends_with(".old")) {
            continue;
        }
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_belongs_to_one_run() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let mut first = RunFolder::look(&path, false).unwrap();
        let mut late = RunFolder::look(&path, false).unwrap();
        first.claim().unwrap();
        assert!(late.claim().unwrap_err().to_string().contains("another process"));
        first.write_config("seed = 1\n").unwrap();
        assert!(RunFolder::look(&path, true).unwrap_err().to_string().contains("another process"));
        drop((first, late));
        assert!(RunFolder::look(&path, false).unwrap_err().to_string().contains("--resume"));
        // Left by a run that was killed while it replaced its adapter's tensors.
        let unfinished = path.join("adapter/prefix/.engraft-x.tmp");
        fs::create_dir_all(path.join("adapter/prefix")).unwrap();
        fs::write(&unfinished, "x").unwrap();
        RunFolder::look(&path, true).unwrap().claim().unwrap();
        assert!(!unfinished.exists());
    }

    #[test]
    fn a_folder_in_which_nothing_began_is_free() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        RunFolder::look(&path, false).unwrap().claim().unwrap();
        RunFolder::look(&path, false).unwrap().claim().unwrap();
        assert_eq!(free_name(root.path(), "run"), root.path().join("run-2"));
    }

    #[test]
    fn cleaning_spares_what_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at(".engraft-abc.tmp"), "x").unwrap();
        fs::create_dir_all(at(".engraft-def.tmp/inside")).unwrap();
        fs::write(at("step-1.safetensors"), "x").unwrap();
        clean(folder.path()).unwrap();
        let left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["step-1.safetensors"]);
    }

    #[test]
    fn a_file_is_no_run_folder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = RunFolder::look(file.path(), false).unwrap_err();
        assert!(error.to_string().contains("is a file") && error.exit_code() == 2);
    }
}
