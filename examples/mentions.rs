//! Counts the held-out completions of the example task that mention every attribute of their record.
//!
//!     cargo run --release --example mentions -- [--q8 | --nf4] [ADAPTER_DIR ...]
//!
//! Continues the prompts of the embedded test data greedily, with the embedded base alone and then with
//! each adapter, and counts the completions that hold every value of their prompt word for word. No
//! name in the test data occurs in the training data. `--q8` and `--nf4` keep the base in 8 and 4 bits.

use std::{env, path::Path, sync::Arc};

use engraft::{
    data::Tokenizer,
    embedded,
    error::{Error, Result},
    generate::{GenerateOptions, Generator},
    model::{Base, BaseDType, BaseSource},
};
use engraft_adapters::peft;

/// Long enough for the longest completion.
const MOST_NEW_TOKENS: usize = 96;

/// The values in a prompt such as `name: Copper Kettle; price: high ->`.
fn values(prompt: &str) -> Vec<&str> {
    prompt.trim_end_matches(" ->").split("; ").filter_map(|field| Some(field.split_once(": ")?.1)).collect()
}

/// Prints how many of `prompts` get a completion with every value, and the first completion.
fn report(name: &str, generator: &Generator, tokenizer: &Tokenizer, prompts: &[String]) -> Result<()> {
    let mut complete = 0;
    let mut first = None;
    for prompt in prompts {
        let ids = tokenizer.encode(prompt)?;
        let sample =
            generator.generate(&ids, &GenerateOptions::greedy(MOST_NEW_TOKENS), &mut |_| Ok(()))?.remove(0);
        let text = sample.text.unwrap_or_default();
        complete += usize::from(values(prompt).into_iter().all(|value| text.contains(value)));
        first.get_or_insert(text);
    }
    let share = 100.0 * complete as f64 / prompts.len() as f64;
    println!("{name}: {complete} of {} mention every attribute ({share:.1}%)", prompts.len());
    println!("    {}{}", prompts[0], first.unwrap_or_default());
    Ok(())
}

fn main() -> Result<()> {
    let mut folders: Vec<String> = env::args().skip(1).collect();
    let mut dtype = BaseDType::F16;
    folders.retain(|word| {
        match word.as_str() {
            "--q8" => dtype = BaseDType::Q8,
            "--nf4" => dtype = BaseDType::Nf4,
            _ => return true,
        }
        false
    });
    let base = Arc::new(Base::load_as(&BaseSource::Embedded, "embedded", Path::new("."), dtype)?);
    let tokenizer = Tokenizer::from_bytes(embedded::TOKENIZER)?;
    let lines = String::from_utf8_lossy(embedded::TEST_DATA);
    let prompts = lines
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).ok()?["prompt"].as_str().map(str::to_owned)
        })
        .collect::<Option<Vec<String>>>()
        .ok_or_else(|| Error::failed("the embedded test data is damaged; rebuild the program"))?;

    let alone = Generator::new(Arc::clone(&base), &[], Some(&tokenizer))?;
    report("base alone", &alone, &tokenizer, &prompts)?;
    for dir in folders {
        let loaded = peft::load(Path::new(&dir), &base.description(), false)?;
        let adapter = [(&loaded.set, loaded.values.as_slice(), 1.0)];
        let adapted = Generator::new(Arc::clone(&base), &adapter, Some(&tokenizer))?;
        report(&dir, &adapted, &tokenizer, &prompts)?;
    }
    Ok(())
}
