//! Measures the speed of reading prompts and of generating tokens, with a few lines of library code.
//!
//!     cargo run --release --example decoding -- BASE_DIR [--adapter DIR] [--prompt N,..] [--rows N,..] [--new N] [--bf16] \
//!         [--q8 | --nf4] [--avx2] [--without]
//!
//! Prints a JSON line: tokens/s of reading prompts of these lengths (median of five), and of generating `--new` tokens
//! greedily after a prompt of 32, for each number of simultaneous samples (all samples together). `--bf16` makes products in
//! BF16 where that is faster, `--q8` and `--nf4` keep matrices in 8 and 4 bits, `--avx2` uses no kernels of AVX-512. With
//! `--without` the same samples are also made without the adapter, alternately token by token, and `cost` is the ratio of
//! the two median times of a token: other work on the machine slows both sides.

use std::{env, path::Path, sync::Arc, time::Instant};

use engraft::{
    device::{
        DType, Device,
        cpu::{Level, limit_level},
    },
    error::{Error, Result},
    model::{AdapterBindings, Base, BaseDType, BaseSource, Decoder},
};
use engraft_adapters::peft;
use engraft_util::rng;
use rayon::prelude::*;

/// Tokens of the prompt before the timed ones.
const PROMPT: usize = 32;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let Some(folder) = arguments.first() else { return Err(Error::input("usage: decoding BASE_DIR [..]")) };
    let option = |name: &str| {
        arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1)).cloned()
    };
    let numbers = |name: &str, default: &str| -> Vec<usize> {
        option(name).unwrap_or(default.into()).split(',').filter_map(|word| word.parse().ok()).collect()
    };
    let new = numbers("--new", "128").first().copied().unwrap_or(128);

    let given = |name: &str| arguments.iter().any(|word| word == name);
    if given("--avx2") {
        limit_level(Level::Avx2);
    }
    let dtype = match () {
        () if given("--q8") => BaseDType::Q8,
        () if given("--nf4") => BaseDType::Nf4,
        () => BaseDType::F16,
    };
    let mut base =
        Base::load_as(&BaseSource::Folder(folder.into()), folder, Path::new("target/cache"), dtype)?;
    if given("--bf16") {
        base = base.on(Device::Cpu, DType::BF16)?;
    }
    let base = Arc::new(base);
    let loaded = option("--adapter")
        .map(|adapter| peft::load(Path::new(&adapter), &base.description(), false))
        .transpose()?;
    let sets: Vec<_> = loaded.iter().map(|loaded| (&loaded.set, 1.0)).collect();
    let bindings = AdapterBindings::new(&sets, base.config.layers)?;
    let values = loaded.as_ref().map(|loaded| loaded.values.clone()).unwrap_or_default();
    let bare = AdapterBindings::new(&[], base.config.layers)?;
    let decoder = |base: &Arc<Base>, adapted: bool, rows: usize, capacity: usize| {
        let (bindings, values) = if adapted { (&bindings, values.clone()) } else { (&bare, Vec::new()) };
        Decoder::new(Arc::clone(base), bindings.clone(), values, rows, capacity)
    };

    let mut lines = Vec::new();
    for prompt in numbers("--prompt", "512") {
        let ids = ids(prompt, base.config.vocab);
        let mut decoder = decoder(&base, true, 1, prompt)?;
        let mut seconds = Vec::new();
        for _ in 0..6 {
            decoder.rewind(0);
            let start = Instant::now();
            decoder.feed(&ids)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        // The first run touches memory for the first time.
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        lines.push(format!("\"prompt {prompt}\": {:.1}", prompt as f64 / seconds[seconds.len() / 2]));
    }
    for rows in numbers("--rows", "1") {
        let base = base.for_generation(rows, new);
        let samples = |adapted: bool| -> Result<Samples> {
            let mut decoder = decoder(&base, adapted, rows, PROMPT + new + 1)?;
            let vocab = base.config.vocab;
            let first = likeliest(decoder.feed(&ids(PROMPT, vocab))?);
            decoder.fork(rows);
            // Samples begin with different tokens.
            let last = (0..rows).map(|row| (first + row as u32) % vocab as u32).collect();
            Ok(Samples { decoder, last, seconds: Vec::new() })
        };
        let (mut with, mut without) =
            (samples(true)?, given("--without").then(|| samples(false)).transpose()?);
        for _ in 0..new {
            with.step(base.config.vocab)?;
            if let Some(without) = &mut without {
                without.step(base.config.vocab)?;
            }
        }
        let speed = (rows * new) as f64 / with.seconds.iter().sum::<f64>();
        lines.push(format!("\"rows {rows}\": {speed:.1}"));
        if let Some(without) = without {
            let cost = 100.0 * (with.median() / without.median() - 1.0);
            lines.push(format!("\"cost {rows}\": \"{cost:.1}%\""));
        }
    }
    println!("{{{}}}", lines.join(", "));
    Ok(())
}

/// Samples that are generated at the same time.
struct Samples {
    decoder: Decoder,
    last: Vec<u32>,
    seconds: Vec<f64>,
}

impl Samples {
    fn step(&mut self, vocab: usize) -> Result<()> {
        let start = Instant::now();
        self.last = self.decoder.feed_each(&self.last)?.par_chunks_exact(vocab).map(likeliest).collect();
        self.seconds.push(start.elapsed().as_secs_f64());
        Ok(())
    }

    fn median(mut self) -> f64 {
        self.seconds.sort_by(f64::total_cmp);
        self.seconds[self.seconds.len() / 2]
    }
}

fn ids(count: usize, vocab: usize) -> Vec<u32> {
    let key = rng::key(&[7]);
    (0..count as u64).map(|at| (rng::bits(key, at) % vocab as u64) as u32).collect()
}

fn likeliest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(id, _)| id as u32)
}
