//! `engraft inspect`: describes the adapter, base or run in a folder, or an adapter or model in a file.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use engraft_adapters::{Kinds, kinds, peft, peft::Description};
use serde_json::{Value, json};

use crate::{
    cli::{
        common::{
            environment::Environment,
            output::{write_json, write_out},
        },
        train::config_file,
    },
    convert::foreign::{self, Foreign, Format, ModelFile, Pair},
    error::{Error, Result},
    model::{Base, BaseSource},
    plan::BaseBytes,
    train::{
        folder,
        save::{self, SaveInfo},
    },
};

/// Options of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Folder of an adapter, a base or a run; a GGUF file, or a .pt file of loralib
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs `engraft inspect`.
///
/// # Errors
/// When the path cannot be read or is none of the three.
pub fn run(args: &InspectArgs) -> Result<()> {
    let found = look(&args.path)?;
    if args.json {
        return write_json(&found);
    }
    let state = found.get("state").map(|state| sentence(state, &args.path));
    let details = match &found {
        // Said in words above.
        Value::Object(fields) => Value::Object(
            fields.iter().filter(|(name, _)| *name != "state").map(|(n, v)| (n.clone(), v.clone())).collect(),
        ),
        other => other.clone(),
    };
    write_out(&format!("{}{}", state.unwrap_or_default(), lines(&details, 0)))
}

/// The state of a run in words: `step 44 of 400, interrupted, loss 2.31`, and the command that goes on.
fn sentence(state: &Value, path: &Path) -> String {
    let name = state["name"].as_str().unwrap_or_default();
    let mut parts = match (state["step"].as_u64(), state["steps"].as_u64()) {
        (Some(step), Some(steps)) => vec![format!("step {step} of {steps}"), name.to_owned()],
        _ => vec![name.to_owned()],
    };
    parts.extend(state["loss"].as_f64().map(|loss| format!("loss {loss:.4}")));
    if let (Some(step), Some(loss)) = (state["best"]["step"].as_u64(), state["best"]["loss"].as_f64()) {
        parts.push(format!("best evaluation loss {loss:.4} after step {step}"));
    }
    let go_on = match name {
        "interrupted" | "not saved yet" => {
            format!("go on with: engraft train --resume --output {}\n", path.display())
        }
        _ => String::new(),
    };
    format!("{}\n{go_on}\n", parts.join(", "))
}

fn look(path: &Path) -> Result<Value> {
    fs::metadata(path).map_err(|cause| Error::reading(path, &cause))?;
    if let Some(format) = Format::of(path) {
        return match foreign::gguf_model(path)? {
            Some(model) => Ok(gguf_model(&model)),
            None => foreign_adapter(path, format),
        };
    }
    let holds = |name: &str| path.join(name).is_file();
    if folder::config_path(path).is_file() {
        run_folder(path)
    } else if holds(peft::CONFIG_FILE) || kinds().iter().any(|kind| path.join(kind.name).is_dir()) {
        Ok(adapter(&peft::describe(path)?))
    } else if holds("config.json") {
        base(path)
    } else {
        Err(Error::input(format!(
            "{}: is {}; name a folder with adapter_config.json, config.json or config.toml, or an adapter in a file of \
             GGUF or loralib",
            path.display(),
            if path.is_dir() { "no adapter, base or run folder" } else { "no file that is read" },
        )))
    }
}

fn adapter(description: &Description) -> Value {
    let adapters = description.adapters.iter().map(|adapter| {
        let kinds = Kinds::of(&adapter.spec);
        let kind = kinds.as_ref().and_then(|kinds| kinds.names().first()).copied().unwrap_or("unsupported");
        let tensors = adapter
            .tensors
            .iter()
            .map(|tensor| json!({ "name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape }));
        json!({
            "kind": kind,
            "folder": adapter.folder.display().to_string(),
            "base": adapter.base,
            "revision": adapter.revision,
            "fingerprint": adapter.fingerprint,
            "lora": adapter.spec.lora,
            "vera": adapter.spec.vera,
            "adalora": adapter.spec.adalora,
            "ia3": adapter.spec.ia3,
            "ln_tuning": adapter.spec.ln_tuning,
            "dora": adapter.spec.dora,
            "prefix": adapter.spec.prefix,
            "prompt_tuning": adapter.spec.prompt_tuning,
            "hint": adapter.hint,
            "ranks": adapter.ranks,
            "parameters": adapter.parameters,
            "unsupported": adapter.unsupported,
            "tensors": tensors.collect::<Vec<_>>(),
        })
    });
    json!({ "kind": "adapter", "adapters": adapters.collect::<Vec<_>>() })
}

/// A LoRA that is not in PEFT's files.
fn foreign_adapter(path: &Path, format: Format) -> Result<Value> {
    let Some(found) = Foreign::open(path)? else {
        return Err(Error::input(format!("{}: is no adapter; name one", path.display())));
    };
    let distinct = |of: &dyn Fn(&Pair) -> String| {
        let texts: BTreeSet<String> = found.pairs.iter().map(of).collect();
        texts.into_iter().collect::<Vec<_>>()
    };
    let ranks: BTreeSet<usize> = found.pairs.iter().map(|pair| pair.b.columns).collect();
    let scales = distinct(&|pair| pair.scale.map_or("not in the file".to_owned(), |scale| scale.to_string()));
    let modules = found.pairs.iter().map(|pair| {
        let [a, b] = [&pair.a, &pair.b].map(|matrix| [matrix.rows, matrix.columns]);
        json!({ "layer": pair.layer, "module": pair.module, "a": a, "b": b })
    });
    Ok(json!({
        "kind": "adapter", "format": format.name(), "method": "lora", "base": found.base,
        "fingerprint": found.fingerprint, "ranks": ranks, "scales": scales,
        "targets": distinct(&|pair| pair.module.clone()), "parameters": found.parameters(),
        "hints": found.hints, "modules": modules.collect::<Vec<_>>(),
    }))
}

/// A model for llama.cpp.
fn gguf_model(found: &ModelFile) -> Value {
    json!({
        "kind": "model", "format": "GGUF", "architecture": found.architecture, "name": found.name,
        "sizes": found.sizes, "types": found.types, "tensors": found.tensors, "parameters": found.parameters,
        "tokens": found.tokens,
    })
}

fn base(path: &Path) -> Result<Value> {
    let source = BaseSource::Folder(path.to_owned());
    let base = Base::load(&source, &path.display().to_string(), Environment::read()?.cache()?)?;
    let description = base.description();
    let sites = description.sites.iter().map(|site| {
        let parts: Vec<&str> = site.parts.iter().map(|part| part.name.as_str()).collect();
        json!({ "name": site.name, "inputs": site.inputs, "outputs": site.outputs, "parts": parts })
    });
    Ok(json!({
        "kind": "base",
        "layers": description.layers,
        "heads": description.heads,
        "width": description.width,
        "positions": description.positions,
        "vocab": description.vocab,
        "parameters": BaseBytes::of(&base.config, base.dtype).total() / 2,
        "fp16_bytes": BaseBytes::of(&base.config, base.dtype).total(),
        "fingerprint": description.fingerprint,
        "sites": sites.collect::<Vec<_>>(),
    }))
}

fn run_folder(path: &Path) -> Result<Value> {
    let config_file = folder::config_path(path);
    let text = fs::read_to_string(&config_file).map_err(|cause| Error::reading(&config_file, &cause))?;
    let config = config_file::table(&config_file::parse(&text, &config_file.display().to_string())?)?;
    let newest = save::newest(&path.join("saves"))?;
    let mut found = json!({ "kind": "run", "config": config });
    found["state"] = state(path, newest.as_ref().map(|(save, _)| &save.info), config.get("patience"));
    if let Some((save, damaged)) = newest {
        found["save"] = json!({
            "step": save.info.step, "steps": save.info.steps, "base_fingerprint": save.info.base,
            "data_fingerprint": save.info.data, "machine": save.info.machine, "values": save.values(),
            "optimizer": save.info.optimizer,
        });
        found["damaged"] = json!(damaged);
    }
    let adapter_folder = path.join("adapter");
    if adapter_folder.is_dir() {
        found["adapter"] = adapter(&peft::describe(&adapter_folder)?);
    }
    Ok(found)
}

/// Where the run in `path` stands, whose newest save is `info`.
fn state(path: &Path, info: Option<&SaveInfo>, patience: Option<&toml::Value>) -> Value {
    let is_running = folder::is_in_use(path);
    let Some(info) = info else {
        return json!({ "name": if is_running { "running" } else { "not saved yet" } });
    };
    let progress = &info.progress;
    let patience = patience.and_then(toml::Value::as_integer).and_then(|steps| u64::try_from(steps).ok());
    let name = if is_running {
        "running"
    } else if info.step >= info.steps {
        "finished"
    } else if patience.is_some_and(|patience| progress.waited >= patience) {
        "stopped early"
    } else {
        "interrupted"
    };
    json!({
        "name": name, "step": info.step, "steps": info.steps, "loss": progress.loss, "best": progress.best,
    })
}

/// `value` for people: a `name: value` line each, what is inside indented.
fn lines(value: &Value, depth: usize) -> String {
    let indent = "  ".repeat(depth);
    let entries: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (format!("{name}:"), value)).collect(),
        Value::Array(items) => items.iter().map(|value| ("-".to_owned(), value)).collect(),
        single => return format!("{indent}{}\n", plain(single)),
    };
    entries
        .into_iter()
        .filter(|(_, value)| !is_nothing(value))
        .map(|(name, value)| match value {
            Value::Object(fields) if is_flat(value) && name == "-" => {
                let words = fields.iter().filter(|(_, value)| !is_nothing(value));
                let words = words.map(|(name, value)| format!("{name} {}", plain(value))).collect::<Vec<_>>();
                format!("{indent}- {}\n", words.join(", "))
            }
            Value::Object(_) => format!("{indent}{name}\n{}", lines(value, depth + 1)),
            Value::Array(items) if items.iter().any(Value::is_object) => {
                format!("{indent}{name}\n{}", lines(value, depth + 1))
            }
            single => format!("{indent}{name} {}\n", plain(single)),
        })
        .collect()
}

fn is_flat(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| {
        fields.values().all(|value| {
            !value.is_object() && !value.as_array().is_some_and(|items| items.iter().any(Value::is_object))
        })
    })
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// A value on one line: lists are cut to three, fingerprints to twelve digits.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => shortened(text),
        Value::Array(items) => {
            let shown = items.iter().take(MOST_SHOWN).map(plain).collect::<Vec<_>>().join(", ");
            match items.len().saturating_sub(MOST_SHOWN) {
                0 => format!("[{shown}]"),
                more => format!("[{shown} and {more} more]"),
            }
        }
        other => other.to_string(),
    }
}

/// Items of a list that people are shown.
const MOST_SHOWN: usize = 3;
/// Digits of a fingerprint that people are shown, enough to tell two apart.
const DIGITS: usize = 12;

/// `text` with the digits of a fingerprint (64 hexadecimal ones after the last colon) cut.
fn shortened(text: &str) -> String {
    let (kind, digits) = text.rfind(':').map_or(("", text), |colon| text.split_at(colon + 1));
    let is_hash = digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hash { format!("{kind}{}", &digits[..DIGITS]) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_get_lines() {
        let value = json!({ "kind": "base", "none": null, "sites": [{ "name": "a", "inputs": 3, "parts": ["q", "k"] }] });
        assert_eq!(lines(&value, 0), "kind: base\nsites:\n  - inputs 3, name a, parts [q, k]\n");
    }

    #[test]
    fn hashes_and_lists_are_cut_for_people() {
        let hash = "0123456789abcdef".repeat(4);
        assert_eq!(plain(&json!(format!("engraft1:blake3:{hash}"))), "engraft1:blake3:0123456789ab");
        assert_eq!(plain(&json!(hash)), "0123456789ab");
        assert_eq!(plain(&json!("a:b")), "a:b");
        assert_eq!(plain(&json!([1, 2, 3])), "[1, 2, 3]");
        assert_eq!(plain(&json!([1, 2, 3, 4, 5])), "[1, 2, 3 and 2 more]");
    }

    #[test]
    fn a_folder_of_something_else_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(look(folder.path()).unwrap_err().to_string().contains("no adapter, base or run"));
        assert!(look(&folder.path().join("x")).unwrap_err().to_string().contains("check the path"));
    }
}
