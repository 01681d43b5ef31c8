//! `engraft-infer generate`: continues prompts with a base and adapters.

use std::path::Path;

use engraft_adapters::{AdapterSet, peft::Loaded};
use serde_json::json;

use super::{
    prompts::{Prompt, PromptArgs},
    sampling::SamplingArgs,
};
use crate::{
    cli::common::{
        adapters::base_and_adapters,
        args::{BaseArgs, ComputeArgs},
        environment::Environment,
        open::{self, Compute, Opened},
        options::{FROM_ONE, Options, options, switch, value},
        output::{write_json, write_out},
        signals,
        values::ScaledAdapter,
    },
    error::{Error, Result},
    generate::{GenerateOptions, Generator, Sample, Scaled},
};

options! {
    /// Options of `generate`.
    GenerateArgs { base: BaseArgs, compute: ComputeArgs, prompts: PromptArgs, sampling: SamplingArgs }

    "" {
        /// Run folder, adapter folder or hub id, optionally with =SCALE; repeatable, LoRAs are summed
        adapter: Vec<ScaledAdapter> => value("DIR[=SCALE]").basic();
        /// One JSON object per sample on stdout, nothing else there
        json: bool => switch().basic();
    }

    "Sampling" {
        /// Samples per prompt
        num_samples: usize = 1 => value("N").check(FROM_ONE).basic();
        /// Samples of a prompt made at a time; more than one are shown when all are done
        micro_batch: usize = 1 => value("N").check(FROM_ONE);
    }
}

/// Most new tokens of a sample if the user names no number.
const MOST: usize = 64;

/// The base of a command with its adapters.
pub struct Ready {
    /// The base and its tokenizer.
    pub opened: Opened,
    /// The adapters, in the order given.
    loaded: Vec<Loaded>,
    scales: Vec<f32>,
}

impl Ready {
    /// Opens base and adapters.
    ///
    /// # Errors
    /// When they cannot be found or read, or do not fit each other.
    pub fn open(named: &[ScaledAdapter], base: &BaseArgs, compute: &ComputeArgs) -> Result<Self> {
        open::threads(compute.threads)?;
        let device = Compute::open(compute.device, compute.precision)?;
        let names: Vec<&Path> = named.iter().map(|adapter| adapter.name.as_path()).collect();
        let environment = Environment::read()?;
        let (opened, loaded) = base_and_adapters(&names, base, &environment, device, compute.streams())?;
        check_together(&loaded, named)?;
        Ok(Self { opened, loaded, scales: named.iter().map(|adapter| adapter.scale as f32).collect() })
    }

    /// What generates with them.
    ///
    /// # Errors
    /// When the adapters cannot be used together.
    pub fn generator(&self) -> Result<Generator<'_>> {
        let adapters = self.loaded.iter().zip(&self.scales);
        let adapters: Vec<Scaled> =
            adapters.map(|(loaded, scale)| (&loaded.set, loaded.values.as_slice(), *scale)).collect();
        Generator::new(self.opened.base.clone(), &adapters, self.opened.tokenizer.as_ref())
    }

    /// Refuses stop texts for a base without a tokenizer.
    ///
    /// # Errors
    /// When there is one.
    pub fn check_stop(&self, options: &GenerateOptions) -> Result<()> {
        if self.opened.tokenizer.is_none() && !options.stop.is_empty() {
            return Err(Error::input("--stop: the base has no tokenizer to compare text with; leave it out"));
        }
        Ok(())
    }
}

/// Runs `engraft-infer generate`.
///
/// # Errors
/// When an option is invalid, or a base, adapter or file cannot be read or does not fit the others.
pub fn run(args: &GenerateArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    let (num_samples, micro_batch) = (args.num_samples(), args.micro_batch());
    let options = GenerateOptions { num_samples, micro_batch, ..args.sampling.generate_options(MOST)? };
    let given = args.prompts.read()?;
    let ready = Ready::open(args.adapter.as_deref().unwrap_or_default(), &args.base, &args.compute)?;
    let generator = ready.generator()?;
    ready.check_stop(&options)?;
    let room = generator.room();
    let prompts = given.iter().map(|given| given.prompt(&ready.opened, room)).collect::<Result<Vec<_>>>()?;
    let output = Output { json: args.json == Some(true), prompts: prompts.len(), samples: num_samples };
    for (index, prompt) in prompts.iter().enumerate() {
        let seed = options.seed.wrapping_add((index as u64).wrapping_mul(num_samples as u64));
        output.answer(index, prompt, &generator, &GenerateOptions { seed, ..options.clone() })?;
    }
    Ok(())
}

/// How samples are shown.
struct Output {
    json: bool,
    /// Number of prompts.
    prompts: usize,
    /// Samples of each.
    samples: usize,
}

impl Output {
    fn answer(
        &self,
        index: usize,
        prompt: &Prompt,
        generator: &Generator,
        options: &GenerateOptions,
    ) -> Result<()> {
        let mut begun = None;
        let mut stream = |sample: usize, piece: &str| {
            if self.json {
                return Ok(());
            }
            if begun.replace(sample) != Some(sample) {
                write_out(&self.title(index, sample, prompt))?;
            }
            write_out(piece)
        };
        let samples = generator.generate_each(&prompt.ids, options, &mut stream)?;
        for (number, sample) in samples.iter().enumerate() {
            if self.json {
                self.write_json(prompt, sample)?;
            } else if sample.text.is_none() {
                let ids = sample.token_ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                write_out(&format!("{}{ids}\n", self.title(index, number, prompt)))?;
            }
        }
        Ok(())
    }

    fn write_json(&self, prompt: &Prompt, sample: &Sample) -> Result<()> {
        write_json(&json!({
            "prompt": prompt.shown, "text": sample.text, "token_ids": sample.token_ids,
            "finish_reason": sample.finish.name(), "tokens_per_s": sample.tokens_per_s,
        }))
    }

    /// What stands above a sample if there are several: a blank line before all but the first, then which it is.
    fn title(&self, index: usize, sample: usize, prompt: &Prompt) -> String {
        if self.prompts * self.samples == 1 {
            return String::new();
        }
        let gap = if index + sample == 0 { "" } else { "\n" };
        let prompt_number = match self.prompts {
            1 => String::new(),
            all => format!("prompt {} of {all}", index + 1),
        };
        let sample_number = match self.samples {
            1 => String::new(),
            all => format!("sample {} of {all}", sample + 1),
        };
        let comma = if prompt_number.is_empty() || sample_number.is_empty() { "" } else { ", " };
        format!("{gap}--- {prompt_number}{comma}{sample_number}: {}\n", prompt.label)
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
    for (index, (Loaded { set, .. }, ScaledAdapter { name, scale, .. })) in
        loaded.iter().zip(named).enumerate()
    {
        if set.loras.is_empty() && set.embedding.is_none() && *scale != 1.0 {
            let what = match (&set.prompt, &set.prefix) {
                (Some(_), _) => "prompt of virtual tokens",
                (_, Some(_)) => "prefix",
                _ if set.vectors.is_empty() => "layer norm",
                _ => "vector that scales a module",
            };
            return Err(Error::input(format!(
                "--adapter {}={scale}: a {what} cannot be scaled; leave ={scale} out",
                name.display()
            )));
        }
        let before = &loaded[..index];
        if set.prompt.is_some() && before.iter().any(|other| other.set.prompt.is_some()) {
            return refuse(index, "prompt of virtual tokens");
        }
        if set.prefix.is_some() && before.iter().any(|other| other.set.prefix.is_some()) {
            return refuse(index, "prefix");
        }
        let any = |len: fn(&AdapterSet) -> usize| loaded[..=index].iter().any(|one| len(&one.set) > 0);
        if any(AdapterSet::prefix_len) && any(AdapterSet::prompt_len) {
            return Err(Error::input(format!(
                "--adapter {}: a prefix and a prompt of virtual tokens are never trained together; leave one of \
                 them out",
                name.display()
            )));
        }
    }
    Ok(())
}
