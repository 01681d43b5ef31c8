//! Indexes of checkpoints that are cut into several files (`*.index.json`).

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// Why an index of shards cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {cause}", .path.display())]
    Read {
        /// Path of the index file.
        path: PathBuf,
        /// Why, in the system's words.
        cause: io::Error,
    },
    /// The file is no index. The message is a sentence for the user.
    #[error("{}: {what}; get the file again", .path.display())]
    Wrong {
        /// Path of the index file.
        path: PathBuf,
        /// The broken rule, as the end of a sentence.
        what: String,
    },
}

/// The file names in the `weight_map` of an index, sorted, each once.
///
/// # Errors
/// [`IndexError`] when the index cannot be read, is no index, or names a file outside its folder.
pub fn names(index: &Path) -> Result<Vec<String>, IndexError> {
    let wrong = |what: String| IndexError::Wrong { path: index.to_owned(), what };
    let text =
        fs::read_to_string(index).map_err(|cause| IndexError::Read { path: index.to_owned(), cause })?;
    let json: Value = serde_json::from_str(&text).map_err(|cause| wrong(format!("is no JSON: {cause}")))?;
    let map = json.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| wrong("has no weight_map".into()))?;
    let mut names = BTreeSet::new();
    for value in map.values() {
        // A name with a folder in it could lead anywhere.
        let name = value.as_str().filter(|name| {
            !name.contains(['/', '\\']) && (name.ends_with(".safetensors") || name.ends_with(".bin"))
        });
        let name = name.ok_or_else(|| {
            wrong(format!("names the shard {value}, which is no weights file in the same folder"))
        })?;
        names.insert(name.to_owned());
    }
    if names.is_empty() {
        return Err(wrong("names no shard".into()));
    }
    Ok(names.into_iter().collect())
}
