//! From the name of a base or an adapter to local files: a folder, or a model of the hub in its shared cache.
//!
//! Nothing here reads the environment: endpoint, token, proxies and cache folder come in [`HubOptions`].
//! Only the files that are needed are fetched, all from the commit that the first of them came from. A
//! cut download goes on where it stopped at the next try.

mod client;
mod download;
mod explain;
mod proxy;
mod push;
mod repo;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use engraft_adapters::kinds;
use engraft_util::shards;

use self::{client::Client, repo::Repo};
pub use self::{
    proxy::Proxies,
    push::{Push, Pushed, Upload, push},
};
use crate::error::{Error, Result, TILDE};

/// The branch that is meant where none is named.
const MAIN: &str = "main";

/// How to reach the hub, and where its files are kept.
#[derive(Debug, Clone, Default)]
pub struct HubOptions {
    /// Address of the hub; `None` is the client's own.
    pub endpoint: Option<String>,
    /// Access token; `None` asks anonymously.
    pub token: Option<String>,
    /// The shared cache, usually `~/.cache/huggingface/hub`.
    pub cache: PathBuf,
    /// Branch, tag or commit; `None` is the main branch.
    pub revision: Option<String>,
    /// Whether only what the cache holds may be used.
    pub offline: bool,
    /// Proxies of the network.
    pub proxies: Proxies,
}

/// How far the download of a file has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Name of the file in its repository.
    pub file: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// Bytes of the whole file; 0 while unknown.
    pub total: u64,
}

/// Whether the hub answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reached {
    /// It answers; with a token, it knows the token.
    Yes,
    /// It answers and refuses the token.
    BadToken,
    /// There was no answer, and why.
    No(String),
}

/// Address of the hub, and whether it answers within `patience`.
///
/// # Errors
/// When the address or the token cannot be used.
pub fn reach(options: &HubOptions, patience: Duration) -> Result<(String, Reached)> {
    let client = Client::new(options)?;
    let reached = match client.ping(patience) {
        Ok(status) if status.as_u16() == 401 && options.token.is_some() => Reached::BadToken,
        Ok(_) => Reached::Yes,
        Err(why) => Reached::No(why),
    };
    Ok((client.endpoint().to_owned(), reached))
}

/// The folder `name`, or else the hub's model of that id (`name` or `owner/name`) as a folder of the cache.
///
/// # Errors
/// [`Error::Input`] when `name` is neither, or names what is not there or may not be read;
/// [`Error::Failed`] when the network or the disk does.
pub fn base(name: &str, options: &HubOptions, progress: &dyn Fn(Progress)) -> Result<PathBuf> {
    match local(name, "--base")? {
        Some(folder) => Ok(folder),
        None => base_files(&Repo::open(name, options, progress)?),
    }
}

/// As [`base()`], but of a model of the hub only what sizes and tokens need: no weights.
///
/// # Errors
/// As [`base()`].
pub fn tokenizer(name: &str, options: &HubOptions, progress: &dyn Fn(Progress)) -> Result<PathBuf> {
    match local(name, "--base")? {
        Some(folder) => Ok(folder),
        None => config_and_tokenizer(&Repo::open(name, options, progress)?),
    }
}

/// The file `file` of the hub's data set `id` (`owner/name`) as a file of the cache.
///
/// # Errors
/// [`Error::Input`] when `id` is none, or names what is not there or may not be read; [`Error::Failed`] when the network or
/// the disk does.
pub fn data_file(id: &str, file: &str, options: &HubOptions, progress: &dyn Fn(Progress)) -> Result<PathBuf> {
    if !is_id(id) {
        return Err(Error::input(format!("hub:{id}/{file}: {id:?} is no id; give hub:owner/name/file")));
    }
    if file.split('/').any(|part| part.is_empty() || part == "..") {
        return Err(Error::input(format!("hub:{id}/{file}: {file:?} is no file; give hub:owner/name/file")));
    }
    let repo = Repo::data_set(id, options, progress)?;
    repo.get(file)?.ok_or_else(|| repo.absent(file))
}

/// The folder `name`, or else the hub's adapter of that id as a folder of the cache.
///
/// The folder holds PEFT's two files, or folders of methods, such as `lora/` and `prefix/`, that do.
///
/// # Errors
/// As [`base()`].
pub fn adapter(name: &str, options: &HubOptions, progress: &dyn Fn(Progress)) -> Result<PathBuf> {
    match local(name, "--adapter")? {
        Some(folder) => Ok(folder),
        None => adapter_files(&Repo::open(name, options, progress)?),
    }
}

/// `name` as a folder; `None` when it can only be an id.
fn local(name: &str, option: &str) -> Result<Option<PathBuf>> {
    let path = Path::new(name);
    if path.is_dir() {
        return Ok(Some(path.to_owned()));
    }
    if path.exists() {
        let what = match option {
            "--adapter" => {
                "is a file, but neither GGUF nor loralib's; give one of these, or the folder of an adapter"
            }
            _ => "is a file; give the folder that holds it",
        };
        return Err(Error::input(format!("{option} {name}: {what}")));
    }
    if is_id(name) {
        return Ok(None);
    }
    if path.starts_with("~") {
        return Err(Error::input(format!("{option} {name}: is not there; {TILDE}")));
    }
    Err(Error::input(format!(
        "{option} {name}: is neither a folder nor a hub id; check the path, or give an id as `name` or `owner/name`"
    )))
}

/// The hub's own rule for ids: at most two parts of letters, digits and `-_.`, with no `-` or `.` at the
/// ends and none doubled.
pub fn is_id(name: &str) -> bool {
    let part = |part: &str| {
        let inner = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        let ends = part.starts_with(['-', '.']) || part.ends_with(['-', '.']);
        !part.is_empty() && inner && !ends && !part.contains("--") && !part.contains("..")
    };
    name.len() <= 96 && name.split('/').count() <= 2 && name.split('/').all(part)
}

/// `config.json` and the tokenizer if there is one; their folder.
fn config_and_tokenizer(repo: &Repo) -> Result<PathBuf> {
    let Some(config) = repo.get("config.json")? else { return Err(repo.absent("config.json")) };
    if repo.get("tokenizer.json")?.is_none() && repo.get("vocab.json")?.is_some() {
        repo.get("merges.txt")?;
    }
    Ok(config.parent().unwrap_or(Path::new("")).to_owned())
}

/// As [`config_and_tokenizer`], and the weights in the first form that is there.
fn base_files(repo: &Repo) -> Result<PathBuf> {
    let folder = config_and_tokenizer(repo)?;
    for (single, index) in [
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ] {
        if repo.get(single)?.is_some() {
            return Ok(folder);
        }
        if let Some(index) = repo.get(index)? {
            for shard in shards::names(&index)? {
                repo.get(&shard)?.ok_or_else(|| repo.absent(&shard))?;
            }
            return Ok(folder);
        }
    }
    Err(repo.absent("model.safetensors, model.safetensors.index.json or pytorch_model.bin"))
}

/// PEFT's two files at the top, or in folders of methods.
fn adapter_files(repo: &Repo) -> Result<PathBuf> {
    if let Some(config) = repo.get("adapter_config.json")? {
        // Adapters of old versions of PEFT have a pickle instead.
        if repo.get("adapter_model.safetensors")?.is_none() && repo.get("adapter_model.bin")?.is_none() {
            return Err(repo.absent("adapter_model.safetensors"));
        }
        return Ok(config.parent().unwrap_or(Path::new("")).to_owned());
    }
    let mut folder = None;
    for part in kinds().into_iter().map(|kind| kind.name) {
        if let Some(config) = repo.get(&format!("{part}/adapter_config.json"))? {
            let weights = format!("{part}/adapter_model.safetensors");
            repo.get(&weights)?.ok_or_else(|| repo.absent(&weights))?;
            folder = config.parent().and_then(Path::parent).map(Path::to_owned);
        }
    }
    folder.ok_or_else(|| repo.absent("adapter_config.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_the_hubs_rule() {
        for id in ["gpt2", "openai-community/gpt2-xl", "a/b_c.d"] {
            assert!(is_id(id), "{id}");
        }
        for name in
            ["", "a/b/c", "./gpt2", "../x", "a//b", "-a", "a.", "a--b", "a..b", "a b", "/a", "a/", "~/x", "é"]
        {
            assert!(!is_id(name), "{name}");
        }
        assert!(!is_id(&"a".repeat(97)));
    }

    #[test]
    fn a_folder_wins_and_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().to_str().unwrap();
        let progress = |_| {};
        let found = base(name, &HubOptions::default(), &progress).unwrap();
        assert_eq!(found, dir.path());
        std::fs::write(dir.path().join("x"), "").unwrap();
        let error = adapter(&format!("{name}/x"), &HubOptions::default(), &progress).unwrap_err();
        assert!(error.to_string().contains("neither GGUF nor loralib's; give"), "{error}");
        let error = base(&format!("{name}/x"), &HubOptions::default(), &progress).unwrap_err();
        assert!(error.to_string().contains("is a file; give the folder that holds it"), "{error}");
        let error = base("./nowhere", &HubOptions::default(), &progress).unwrap_err();
        assert!(
            error.to_string().starts_with("--base ./nowhere: is neither a folder nor a hub id"),
            "{error}"
        );
    }
}
