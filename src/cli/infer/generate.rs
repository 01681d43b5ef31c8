//! `engraft-infer generate`: continues prompts with a base and adapters.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

use engraft_adapters::peft::Loaded;
use serde_json::{Value, json};

use crate::{
    cli::common::{
        adapters::base_and_adapters,
        args::{BaseArgs, ComputeArgs},
        environment::Environment,
        open::{self, Compute, Opened},
        options::{Check, FROM_ONE, Options, from_zero, options, switch, unless, value},
        output::{write_json, write_out},
        signals,
        values::{ScaledAdapter, TokenIds},
    },
    error::{Error, Result},
    generate::{GenerateOptions, Generator, Scaled},
    model::Base,
};

options! {
    /// Options of `generate`.
    GenerateArgs { base: BaseArgs, compute: ComputeArgs }

    "" {
        /// Run folder, adapter folder or hub id, optionally with =SCALE; repeatable, LoRAs are summed
        adapter: Vec<ScaledAdapter> => value("DIR[=SCALE]").basic();
        /// One JSON object per sample on stdout, nothing else there
        json: bool => switch().basic();
    }

    "Prompt" {
        /// Text to continue
        #[arg(conflicts_with_all = ["prompt_file", "input_ids"])]
        prompt: String => value("TEXT").otherwise("standard input").basic();
        /// File with one prompt a line
        #[arg(conflicts_with = "input_ids")]
        prompt_file: PathBuf => value("FILE").basic();
        /// The prompt as token ids, with commas between them
        input_ids: TokenIds => value("IDS");
    }

    "Sampling" {
        /// Most new tokens per sample
        max_new_tokens: usize = 64 => value("N").check(FROM_ONE).basic();
        /// No end-of-text before this many new tokens
        min_new_tokens: usize = 0 => value("N");
        /// Temperature of sampling; 0 always takes the likeliest token
        temperature: f64 = 1.0 => value("T").basic().check(from_zero("give 0 for greedy, or a number such as 0.8"));
        /// Sample from the K likeliest tokens; 0 from all
        top_k: usize = 0 => value("K").basic();
        /// Sample from the likeliest tokens that together reach probability P
        top_p: f64 = 1.0 => value("P").basic().check(Check {
            refused: |&part| unless(part > 0.0 && part <= 1.0, part),
            fault: "is not above 0 and at most 1",
            remedy: "give a number such as 0.9",
        });
        /// Divide positive and multiply negative logits of earlier tokens by this number
        repetition_penalty: f64 = 1.0 => value("R").check(Check {
            refused: |penalty| unless((1e-3..=1e3).contains(penalty), penalty),
            fault: "is not between 0.001 and 1000",
            remedy: "give 1 for none, or a number such as 1.2",
        });
        /// Stop at this text, which is not printed; repeatable
        stop: Vec<String> => value("TEXT").basic().check(Check {
            refused: |texts| texts.iter().any(String::is_empty).then(|| "\"\"".to_owned()),
            fault: "every text holds the empty one",
            remedy: "give some text",
        });
        /// Seed of the samples
        seed: u64 = 0 => value("N").basic();
        /// Samples per prompt
        num_samples: usize = 1 => value("N").check(FROM_ONE).basic();
        /// Samples of a prompt made at a time; more than one are shown when all are done
        micro_batch: usize = 1 => value("N").check(FROM_ONE);
    }
}

/// A prompt as given and as ids.
struct Prompt {
    shown: Value,
    ids: Vec<u32>,
}

/// Runs `engraft-infer generate`.
///
/// # Errors
/// When an option is invalid, or a base, adapter or file cannot be read or does not fit the others.
pub fn run(args: &GenerateArgs) -> Result<()> {
    signals::install()?;
    let options = options(args)?;
    let texts = texts(args)?;
    open::threads(args.compute.threads)?;
    let compute = Compute::open(args.compute.device, args.compute.precision)?;
    let environment = Environment::read()?;
    let named = args.adapter.as_deref().unwrap_or_default();
    let names: Vec<&Path> = named.iter().map(|adapter| adapter.name.as_path()).collect();
    let streams = args.compute.streams();
    let (opened, loaded) = base_and_adapters(&names, &args.base, &environment, compute, streams)?;
    check_together(&loaded, named)?;
    let adapters: Vec<Scaled> = loaded
        .iter()
        .zip(named)
        .map(|(loaded, adapter)| (&loaded.set, loaded.values.as_slice(), adapter.scale as f32))
        .collect();
    let generator = Generator::new(opened.base.clone(), &adapters, opened.tokenizer.as_ref())?;
    if opened.tokenizer.is_none() && !options.stop.is_empty() {
        return Err(Error::input("--stop: the base has no tokenizer to compare text with; leave it out"));
    }
    let prompts = match &args.input_ids {
        Some(ids) => vec![from_ids(&ids.0, &opened.base)?],
        None => texts.iter().map(|text| from_text(text, &opened)).collect::<Result<Vec<_>>>()?,
    };
    let room = generator.room();
    for prompt in &prompts {
        if prompt.ids.is_empty() {
            return Err(Error::input(
                "--prompt: is empty and the base has no end-of-text token to begin after; give some text",
            ));
        }
        if prompt.ids.len() > room {
            return Err(Error::input(format!(
                "the prompt has {} tokens, the base has room for {room}; shorten it",
                prompt.ids.len()
            )));
        }
    }
    let samples = options.num_samples as u64;
    (0u64..).zip(&prompts).try_for_each(|(index, prompt)| {
        let seed = options.seed.wrapping_add(index.wrapping_mul(samples));
        answer(prompt, args.json == Some(true), &generator, &GenerateOptions { seed, ..options.clone() })
    })
}

fn answer(prompt: &Prompt, json: bool, generator: &Generator, options: &GenerateOptions) -> Result<()> {
    let mut stream = |piece: &str| if json { Ok(()) } else { write_out(piece) };
    for sample in generator.generate(&prompt.ids, options, &mut stream)? {
        if json {
            write_json(&json!({
                "prompt": prompt.shown, "text": sample.text, "token_ids": sample.token_ids,
                "finish_reason": sample.finish.name(), "tokens_per_s": sample.tokens_per_s,
            }))?;
        } else if sample.text.is_none() {
            write_out(&(sample.token_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",") + "\n"))?;
        }
    }
    Ok(())
}

fn options(args: &GenerateArgs) -> Result<GenerateOptions> {
    args.check()?;
    if args.min_new_tokens() > args.max_new_tokens() {
        let least = args.min_new_tokens();
        return Err(Error::input(format!(
            "--min-new-tokens {least}: is more than --max-new-tokens; give less"
        )));
    }
    Ok(GenerateOptions {
        max_new_tokens: args.max_new_tokens(),
        min_new_tokens: args.min_new_tokens(),
        temperature: args.temperature(),
        top_k: args.top_k(),
        top_p: args.top_p(),
        repetition_penalty: args.repetition_penalty(),
        stop: args.stop.clone().unwrap_or_default(),
        seed: args.seed(),
        num_samples: args.num_samples(),
        micro_batch: args.micro_batch(),
    })
}

/// The prompts that are text; none with `--input-ids`.
fn texts(args: &GenerateArgs) -> Result<Vec<String>> {
    if args.input_ids.is_some() {
        return Ok(Vec::new());
    }
    if let Some(prompt) = &args.prompt {
        return Ok(vec![prompt.clone()]);
    }
    let (name, bytes) = match &args.prompt_file {
        Some(path) => {
            (path.display().to_string(), std::fs::read(path).map_err(|cause| Error::reading(path, &cause))?)
        }
        None => {
            let mut bytes = Vec::new();
            let read = io::stdin().lock().read_to_end(&mut bytes);
            read.map_err(|cause| {
                Error::input(format!("standard input: cannot be read: {cause}; give --prompt"))
            })?;
            ("standard input".to_owned(), bytes)
        }
    };
    let text = String::from_utf8(bytes)
        .map_err(|_| Error::input(format!("{name}: is not UTF-8; save it as UTF-8")))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let prompts: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        return Err(Error::input(format!("{name}: holds no prompt; write one a line, or give --prompt")));
    }
    Ok(prompts)
}

fn from_text(text: &str, opened: &Opened) -> Result<Prompt> {
    let Some(tokenizer) = &opened.tokenizer else {
        return Err(Error::input("--prompt: the base has no tokenizer to read it with; give --input-ids"));
    };
    let mut ids = tokenizer.encode(text)?;
    if ids.is_empty() {
        // As between documents: something begins after an end of text.
        ids.extend(tokenizer.end_of_text(opened.base.config.eos_token));
    }
    Ok(Prompt { shown: json!(text), ids })
}

fn from_ids(ids: &[u32], base: &Base) -> Result<Prompt> {
    let vocab = base.config.vocab;
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => {
            Err(Error::input(format!("--input-ids: {id} is no token of this base; give ids below {vocab}")))
        }
        None => Ok(Prompt { shown: json!(ids), ids: ids.to_vec() }),
    }
}

/// Refuses adapters that cannot be used together, or be scaled.
fn check_together(loaded: &[Loaded], named: &[ScaledAdapter]) -> Result<()> {
    let refuse = |index: usize, what: &str| {
        let name = named[index].name.display();
        Err(Error::input(format!(
            "--adapter {name}: is the second one with a {what}; give one with a {what} and any number of LoRAs"
        )))
    };
    for (index, (Loaded { set, .. }, ScaledAdapter { name, scale })) in loaded.iter().zip(named).enumerate() {
        if set.loras.is_empty() && set.embedding.is_none() && *scale != 1.0 {
            let what = if set.prompt.is_some() { "prompt" } else { "prefix" };
            return Err(Error::input(format!(
                "--adapter {}={scale}: a {what} cannot be scaled; leave ={scale} out",
                name.display()
            )));
        }
        let before = &loaded[..index];
        if set.prompt.is_some() && before.iter().any(|other| other.set.prompt.is_some()) {
            return refuse(index, "prompt");
        }
        if set.prefix.is_some() && before.iter().any(|other| other.set.prefix.is_some()) {
            return refuse(index, "prefix");
        }
    }
    Ok(())
}
