//! `engraft push`: uploads an adapter's folder to the hub.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use engraft_adapters::{kinds, peft};
use serde_json::{Map, Value, json};

use crate::{
    cli::common::{
        adapters::inside_run,
        environment::Environment,
        open::EMBEDDED,
        output::{write_json, write_note, write_out},
        signals,
    },
    error::{Error, Result},
    hub::{self, Push, Upload},
    plan::size,
    train::card::CARD,
};

/// Options of `push`.
#[derive(Debug, Args)]
pub struct PushArgs {
    /// Run folder or adapter folder
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Repository on the hub; it is made if need be
    #[arg(value_name = "OWNER/NAME")]
    pub id: String,
    /// Name of the base in what is uploaded, for an adapter of a base in a folder
    #[arg(long, value_name = "ID")]
    pub base: Option<String>,
    /// Make a new repository for its owner alone
    #[arg(long)]
    pub private: bool,
    /// First line of the commit's message
    #[arg(long, value_name = "TEXT", default_value = "Upload adapter")]
    pub message: String,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs `engraft push`.
///
/// # Errors
/// When the folder holds no adapter, the hub refuses the push, or the network fails.
pub fn run(args: &PushArgs) -> Result<()> {
    signals::install()?;
    if !hub::is_id(&args.id) || !args.id.contains('/') {
        return Err(Error::input(format!("{}: is no repository of the hub; give OWNER/NAME", args.id)));
    }
    let folder = inside_run(&args.folder)?;
    // Refuses a folder without an adapter, or with half of one.
    peft::describe(&folder)?;
    let files = uploads(&folder, args.base.as_deref())?;
    let options = Environment::read()?.hub(None, false)?;
    let push = Push { id: &args.id, files: &files, message: &args.message, private: args.private };
    let progress = |file: &str| write_note(&format!("sending  {file}"));
    let pushed = hub::push(&push, &options, &progress)?;
    let bytes: u64 = files.iter().map(|file| file.bytes.len() as u64).sum();
    if args.json {
        return write_json(&json!({
            "address": pushed.address, "new": pushed.is_new, "commit": pushed.commit,
            "files": files.iter().map(|file| &file.path).collect::<Vec<_>>(), "bytes": bytes,
        }));
    }
    let new = if pushed.is_new { "new repository " } else { "" };
    write_out(&format!(
        "pushed {} to {new}{}\ntry it: engraft-infer generate --adapter {} --prompt \"Once\"\n",
        size(bytes),
        pushed.address,
        args.id
    ))
}

/// The adapter's own files and its card, nothing else that the folder may hold.
fn uploads(folder: &Path, base: Option<&str>) -> Result<Vec<Upload>> {
    let below = kinds().into_iter().map(|kind| folder.join(kind.name)).filter(|folder| folder.is_dir());
    let folders = std::iter::once(folder.to_owned()).chain(below);
    let mut files = Vec::new();
    for each in folders {
        for name in [peft::CONFIG_FILE, peft::TENSOR_FILE, CARD] {
            let path = each.join(name);
            if !path.is_file() {
                continue;
            }
            let mut bytes = fs::read(&path).map_err(|cause| Error::reading(&path, &cause))?;
            if name == peft::CONFIG_FILE {
                bytes = public(&path, &bytes, base)?;
            } else if let (CARD, Some(base)) = (name, base) {
                bytes = with_base(bytes, base);
            }
            let inside = path.strip_prefix(folder).unwrap_or(&path);
            files.push(Upload { path: inside.display().to_string(), bytes });
        }
    }
    Ok(files)
}

/// The config with a base that others can find: never a path of this machine.
fn public(path: &Path, bytes: &[u8], base: Option<&str>) -> Result<Vec<u8>> {
    const KEY: &str = "base_model_name_or_path";
    let mut fields: Map<String, Value> = serde_json::from_slice(bytes).map_err(|cause| {
        Error::input(format!("{}: is no JSON object: {cause}; save the adapter again", path.display()))
    })?;
    let named = fields.get(KEY).and_then(Value::as_str).unwrap_or_default().to_owned();
    match base {
        Some(base) => {
            fields.insert(KEY.to_owned(), json!(base));
            Ok(serde_json::to_string_pretty(&fields).unwrap_or_default().into_bytes())
        }
        None if named == EMBEDDED || hub::is_id(&named) && !Path::new(&named).is_dir() => Ok(bytes.to_vec()),
        None => Err(Error::input(format!(
            "{}: names the base {named:?}, which others cannot find; give its id on the hub with --base ID",
            path.display()
        ))),
    }
}

/// The card with the base in its header, which the hub reads, where the header names none.
fn with_base(card: Vec<u8>, base: &str) -> Vec<u8> {
    const HEADER: &str = "---\n";
    let text = String::from_utf8_lossy(&card);
    match text.strip_prefix(HEADER) {
        Some(rest) if !rest.contains("\nbase_model:") && !rest.starts_with("base_model:") => {
            format!("{HEADER}base_model: {base}\n{rest}").into_bytes()
        }
        _ => card,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_of_this_machine_is_pushed() {
        let config = |base: &str| json!({ "base_model_name_or_path": base, "r": 8 }).to_string().into_bytes();
        let of = |base: &str, given| public(Path::new("x/adapter_config.json"), &config(base), given);
        assert_eq!(of("gpt2", None).unwrap(), config("gpt2"));
        assert_eq!(of("embedded", None).unwrap(), config("embedded"));
        let error = of("/somewhere/private/base", None).unwrap_err().to_string();
        assert!(error.contains("--base ID"), "{error}");
        let public: Value = serde_json::from_slice(&of("/somewhere/base", Some("a/b")).unwrap()).unwrap();
        assert_eq!((&public["base_model_name_or_path"], &public["r"]), (&json!("a/b"), &json!(8)));
    }
}
