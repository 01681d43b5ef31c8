//! After a training run: a prompt before and after it, the adapter's folder, the command that uses it.

use engraft_adapters::peft;
use indicatif::ProgressBar;

use crate::{
    cli::common::{
        open::Opened,
        output::{one_line, quoted, write_out},
        progress::{has_bars, spinner},
        sample,
    },
    error::Result,
    model::BaseDType,
    train::{Finished, record::SampleLine},
};

/// New tokens of a sample.
const NEW_TOKENS: usize = 48;

/// Prints a sample before and after training, the adapter's folder, and the command that uses it. Returns the samples.
///
/// # Errors
/// When the adapter just written cannot be read, or the output cannot be written.
pub fn show(finished: &Finished, opened: &Opened, base: Option<&str>) -> Result<Vec<SampleLine>> {
    let tokenizer = opened.tokenizer.as_ref();
    let prompt = tokenizer.map(|tokenizer| tokenizer.decode(&finished.prompt)).transpose()?;
    let samples = match &prompt {
        Some(prompt) => show_samples(finished, opened, prompt)?,
        None => Vec::new(),
    };
    let mut base = base.map_or(String::new(), |base| format!(" --base {}", quoted(base)));
    if opened.base.dtype != BaseDType::default() {
        base += &format!(" --base-dtype {}", opened.base.dtype.name());
    }
    let adapter = finished.adapter.display().to_string();
    let input = match prompt {
        Some(prompt) => format!("--prompt {}", quoted(&prompt)),
        None => {
            let ids: Vec<String> = finished.prompt.iter().map(u32::to_string).collect();
            format!("--input-ids {}", ids.join(","))
        }
    };
    write_out(&format!(
        "adapter: {adapter}\ntry it: {} generate{base} --adapter {} --temperature 0 {input}\n",
        infer(),
        quoted(&adapter)
    ))?;
    Ok(samples)
}

fn show_samples(finished: &Finished, opened: &Opened, prompt: &str) -> Result<Vec<SampleLine>> {
    let loaded = peft::load(&finished.adapter, &opened.base.description(), false)?;
    let adapter = [(&loaded.set, loaded.values.as_slice(), 1.0)];
    write_out(&format!("prompt: {}\n", one_line(prompt)))?;
    let mut samples = Vec::new();
    for (name, adapters) in [("before", &adapter[..0]), ("after", &adapter[..])] {
        let bar = has_bars().then(|| spinner().with_message("sampling"));
        let text = sample::greedy(opened, adapters, &finished.prompt, NEW_TOKENS);
        bar.iter().for_each(ProgressBar::finish_and_clear);
        let Some(text) = text? else { break };
        write_out(&format!("{name:6}: {}\n", one_line(&text)))?;
        let base_alone = adapters.is_empty();
        let step = if base_alone { 0 } else { finished.step };
        samples.push(SampleLine { step, prompt: prompt.to_owned(), text, base_alone });
    }
    Ok(samples)
}

/// What runs `engraft-infer`: the program next to this one, relative to the current folder if it is below it; where
/// `cargo run` has built this program alone, the same for the other one; else its name.
fn infer() -> String {
    const NAME: &str = "engraft-infer";
    let (Ok(program), Ok(here)) = (std::env::current_exe(), std::env::current_dir()) else {
        return NAME.to_owned();
    };
    let sibling = program.with_file_name(NAME);
    if sibling.is_file() {
        return quoted(&sibling.strip_prefix(&here).unwrap_or(&sibling).display().to_string());
    }
    // Cargo keeps what it compiles in this folder.
    let built_here = program.starts_with(&here) && program.with_file_name("deps").is_dir();
    if built_here && here.join("Cargo.toml").is_file() {
        return format!("cargo run --release --bin {NAME} --");
    }
    NAME.to_owned()
}
