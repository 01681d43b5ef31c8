//! After a training run: what the base and the adapter make of one held-out prompt, and how to go on.

use engraft_adapters::peft;

use super::{open::Opened, report::quoted, write_out};
use crate::{
    data::Tokenizer,
    error::Result,
    generate::{GenerateOptions, Generator},
    model::BaseDType,
    train::Finished,
};

/// New tokens of a sample.
const NEW_TOKENS: usize = 48;

/// Prints a sample before and after training, where the adapter lies, and the command that uses it.
///
/// # Errors
/// When the adapter just written cannot be read, or the output not be written.
pub fn show(finished: &Finished, opened: &Opened, base: Option<&str>) -> Result<()> {
    let prompt = opened.tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&finished.prompt)).transpose()?;
    if let (Some(tokenizer), Some(prompt)) = (&opened.tokenizer, prompt.as_deref()) {
        samples(finished, opened, tokenizer, prompt)?;
    }
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
        quoted(&infer()),
        quoted(&adapter)
    ))
}

fn samples(finished: &Finished, opened: &Opened, tokenizer: &Tokenizer, prompt: &str) -> Result<()> {
    let loaded = peft::load(&finished.adapter, &opened.base.description(), false)?;
    let adapter = [(&loaded.set, loaded.values.as_slice(), 1.0)];
    write_out(&format!("prompt: {}\n", one_line(prompt)))?;
    for (name, adapters) in [("before", &adapter[..0]), ("after", &adapter[..])] {
        let generator = Generator::new(opened.base.clone(), adapters, Some(tokenizer))?;
        let room = generator.room().saturating_sub(finished.prompt.len());
        if room == 0 {
            return Ok(());
        }
        let options = GenerateOptions::greedy(NEW_TOKENS.min(room));
        for sample in generator.generate(&finished.prompt, &options, &mut |_| Ok(()))? {
            write_out(&format!("{name:6}: {}\n", one_line(sample.text.as_deref().unwrap_or_default())))?;
        }
    }
    Ok(())
}

/// How to call `engraft-infer`: the one beside this program, from the current folder if it lies below.
fn infer() -> String {
    let beside = std::env::current_exe().ok().map(|program| program.with_file_name("engraft-infer"));
    let Some(program) = beside.filter(|program| program.is_file()) else { return "engraft-infer".to_owned() };
    let here = std::env::current_dir().ok();
    let short = here.as_deref().and_then(|here| program.strip_prefix(here).ok()).unwrap_or(&program);
    short.display().to_string()
}

/// Line breaks shown as such: a sample takes one line.
fn one_line(text: &str) -> String {
    text.trim().replace('\n', "\\n")
}
