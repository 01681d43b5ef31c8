//! After a training run: a prompt before and after it, the adapter's folder, the command that uses it.

use engraft_adapters::peft;
use engraft_util::shell;

use crate::{
    cli::common::{
        open::Opened,
        output::{one_line, write_out},
        sample,
    },
    error::Result,
    model::BaseDType,
    train::Finished,
};

/// New tokens of a sample.
const NEW_TOKENS: usize = 48;

/// Prints a sample before and after training, the adapter's folder, and the command that uses it.
///
/// # Errors
/// When the adapter just written cannot be read, or the output cannot be written.
pub fn show(finished: &Finished, opened: &Opened, base: Option<&str>) -> Result<()> {
    let tokenizer = opened.tokenizer.as_ref();
    let prompt = tokenizer.map(|tokenizer| tokenizer.decode(&finished.prompt)).transpose()?;
    if let Some(prompt) = &prompt {
        show_samples(finished, opened, prompt)?;
    }
    let mut base = base.map_or(String::new(), |base| format!(" --base {}", shell::word(base)));
    if opened.base.dtype != BaseDType::default() {
        base += &format!(" --base-dtype {}", opened.base.dtype.name());
    }
    let adapter = finished.adapter.display().to_string();
    let input = match prompt {
        Some(prompt) => format!("--prompt {}", shell::word(&prompt)),
        None => {
            let ids: Vec<String> = finished.prompt.iter().map(u32::to_string).collect();
            format!("--input-ids {}", ids.join(","))
        }
    };
    write_out(&format!(
        "adapter: {adapter}\ntry it: {} generate{base} --adapter {} --temperature 0 {input}\n",
        shell::word(&infer()),
        shell::word(&adapter)
    ))
}

fn show_samples(finished: &Finished, opened: &Opened, prompt: &str) -> Result<()> {
    let loaded = peft::load(&finished.adapter, &opened.base.description(), false)?;
    let adapter = [(&loaded.set, loaded.values.as_slice(), 1.0)];
    write_out(&format!("prompt: {}\n", one_line(prompt)))?;
    for (name, adapters) in [("before", &adapter[..0]), ("after", &adapter[..])] {
        let Some(text) = sample::greedy(opened, adapters, &finished.prompt, NEW_TOKENS)? else {
            return Ok(());
        };
        write_out(&format!("{name:6}: {}\n", one_line(&text)))?;
    }
    Ok(())
}

/// The program `engraft-infer` next to this one, relative to the current folder if it is below it.
fn infer() -> String {
    let sibling = std::env::current_exe().ok().map(|program| program.with_file_name("engraft-infer"));
    let Some(program) = sibling.filter(|program| program.is_file()) else {
        return "engraft-infer".to_owned();
    };
    let here = std::env::current_dir().ok();
    let short = here.as_deref().and_then(|here| program.strip_prefix(here).ok()).unwrap_or(&program);
    short.display().to_string()
}
