//! The model card of an adapter that was made of others, or of a model: `README.md` in the form that the hub and PEFT read.

use std::{fmt::Write, path::Path};

use engraft_adapters::BaseDescription;
use engraft_util::{atomic, words::short_hash};

use crate::error::Result;

/// Name of the base that is compiled into the program.
const EMBEDDED: &str = "embedded";

/// Writes the card of a LoRA into its folder: how it was `made`, a sentence, and `rows` of a table.
///
/// # Errors
/// When it cannot be written.
pub fn write_card(
    folder: &Path,
    base: &BaseDescription,
    made: &str,
    rows: &[(&'static str, String)],
) -> Result<()> {
    let is_folder = Path::new(&base.name).is_absolute() || Path::new(&base.name).is_dir();
    let id = (!is_folder && base.name != EMBEDDED).then_some(base.name.as_str());
    let name = match id {
        Some(id) => id.to_owned(),
        None if base.name == EMBEDDED => "the embedded base of engraft".to_owned(),
        None => {
            let last = Path::new(&base.name).file_name().map(|name| name.to_string_lossy().into_owned());
            format!("{} (a folder)", last.unwrap_or_default())
        }
    };
    let mut text = "---\n".to_owned();
    if let Some(id) = id {
        let _ = writeln!(text, "base_model: {id}");
    }
    text += "library_name: peft\npipeline_tag: text-generation\ntags:\n";
    if let Some(id) = id {
        let _ = writeln!(text, "- base_model:adapter:{id}");
    }
    let _ = write!(
        text,
        "- engraft\n- lora\n- transformers\n---\n\n# lora adapter for {name}\n\n{made} with engraft {}. The folder \
         holds the files of PEFT.\n\n| | |\n|---|---|\n| base | {name} |\n",
        env!("CARGO_PKG_VERSION")
    );
    if let Some(print) = &base.fingerprint {
        let _ = writeln!(text, "| fingerprint of the base | {} |", short_hash(print));
    }
    for (name, value) in rows {
        let _ = writeln!(text, "| {name} | {} |", value.replace('|', "\\|"));
    }
    Ok(atomic::write(&folder.join("README.md"), text.as_bytes())?)
}
