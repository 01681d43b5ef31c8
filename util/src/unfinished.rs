//! Files and folders that mean nothing until they are finished, removed when the program has to stop at once.
//!
//! A program that is told to stop runs no destructors. So whoever writes beside a file's place notes the
//! temporary path here, and whoever stops the program calls [`remove_all`] first. A program that is killed
//! cannot do so; its leftovers are removed by the next one that comes by.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
    thread,
    time::Duration,
};

/// How often, and with what pauses, the lock is tried before the process stops without removing anything.
const TRIES: usize = 20;
const PAUSE: Duration = Duration::from_millis(5);

/// A path that is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Leftover {
    File(PathBuf),
    /// Removed only while it is empty.
    Folder(PathBuf),
    /// Removed with all that is in it.
    Tree(PathBuf),
}

impl Leftover {
    fn remove(&self) {
        // What is gone already, or was filled by somebody else, stays as it is.
        let _ = match self {
            Self::File(path) => fs::remove_file(path),
            Self::Folder(path) => fs::remove_dir(path),
            Self::Tree(path) => fs::remove_dir_all(path),
        };
    }
}

/// All unfinished paths of the process with a number each, in the order in which they were made.
static ALL: Mutex<(u64, Vec<(u64, Leftover)>)> = Mutex::new((0, Vec::new()));

fn all() -> MutexGuard<'static, (u64, Vec<(u64, Leftover)>)> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The note that a path is unfinished, until it is dropped. Dropping removes nothing.
#[derive(Debug)]
#[must_use = "dropping it says that the path is finished"]
pub struct Unfinished(u64);

impl Drop for Unfinished {
    fn drop(&mut self) {
        all().1.retain(|(number, _)| *number != self.0);
    }
}

/// Makes a file and notes its `path`. No path is made after [`remove_all`].
///
/// # Errors
/// The error of `make`.
pub fn file<T>(
    make: impl FnOnce() -> io::Result<T>,
    path: impl FnOnce(&T) -> PathBuf,
) -> io::Result<(T, Unfinished)> {
    noted(make, |made| Leftover::File(path(made)))
}

/// Makes the folder `path` itself, not those around it, and notes it. Only an empty folder is removed.
///
/// # Errors
/// When it is there already or cannot be made.
pub fn folder(path: &Path) -> io::Result<Unfinished> {
    noted(|| fs::create_dir(path), |()| Leftover::Folder(path.to_owned())).map(|((), note)| note)
}

/// Makes a folder and notes its `path`. It is removed with all that is in it then: nothing of a user may be there.
///
/// # Errors
/// The error of `make`.
pub fn tree<T>(
    make: impl FnOnce() -> io::Result<T>,
    path: impl FnOnce(&T) -> PathBuf,
) -> io::Result<(T, Unfinished)> {
    noted(make, |made| Leftover::Tree(path(made)))
}

fn noted<T>(
    make: impl FnOnce() -> io::Result<T>,
    leftover: impl FnOnce(&T) -> Leftover,
) -> io::Result<(T, Unfinished)> {
    // Held while it is made: otherwise a path could come to be after all others were removed.
    let mut all = all();
    let made = make()?;
    let number = all.0;
    all.0 += 1;
    let leftover = leftover(&made);
    all.1.push((number, leftover));
    Ok((made, Unfinished(number)))
}

/// Removes every unfinished path, the newest first, and keeps threads that would make another one waiting
/// until the process ends. For the moment before [`std::process::exit`].
pub fn remove_all() {
    // The thread that has the lock may be the one that stops here, or wait for a slow disk.
    let held = (0..TRIES).find_map(|_| match ALL.try_lock() {
        Ok(all) => Some(all),
        Err(TryLockError::Poisoned(all)) => Some(all.into_inner()),
        Err(TryLockError::WouldBlock) => {
            thread::sleep(PAUSE);
            None
        }
    });
    let Some(all) = held else { return };
    all.1.iter().rev().for_each(|(_, leftover)| leftover.remove());
    std::mem::forget(all);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only test that may call [`remove_all`]: it stops all others that make such a path.
    #[test]
    #[ignore = "run by the test below in a process of its own"]
    fn removes_all() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let create = |name: &str| file(|| fs::File::create_new(at(name)).map(|_| at(name)), PathBuf::clone);
        let (_, finished) = create("finished").unwrap();
        drop(finished);
        let outer = folder(&at("outer")).unwrap();
        let inner = folder(&at("outer/inner")).unwrap();
        let full = folder(&at("full")).unwrap();
        fs::write(at("full/mine"), "x").unwrap();
        let (_, unfinished) = create("outer/inner/unfinished").unwrap();
        let (_, whole) = tree(|| fs::create_dir(at("whole")).map(|()| at("whole")), PathBuf::clone).unwrap();
        fs::write(at("whole/part"), "x").unwrap();
        assert!(folder(&at("full")).is_err() && create("finished").is_err());
        remove_all();
        let mut names: Vec<_> =
            fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["finished", "full"]);
        assert!(at("full/mine").exists());
        std::mem::forget((outer, inner, full, unfinished, whole));
        println!("REMOVED");
    }

    #[test]
    fn what_is_unfinished_is_removed_and_nothing_else() {
        let test = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["unfinished::tests::removes_all", "--exact", "--ignored", "--nocapture"])
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&test.stdout).contains("REMOVED"), "{test:?}");
    }
}
