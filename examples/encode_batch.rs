//! Times the tokenizer crate's own `encode_batch_fast`, the measure for the speed of loading data.
//!
//!     cargo run --release --example encode_batch -- TOKENIZER_DIR DATA.jsonl
//!
//! DATA has an object with a `text` a line. Texts are read before the clock starts and are encoded in groups of
//! 8192 on all cores. benchmarks/tokenize_speed.py runs it beside engraft's reader and `datasets.map`.

use std::{error::Error, fs, path::Path, time::Instant};

use tokenizers::Tokenizer;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, data] = &arguments[..] else { return Err("give TOKENIZER_FOLDER DATA.jsonl".into()) };
    let tokenizer = Tokenizer::from_file(Path::new(folder).join("tokenizer.json"))?;
    let texts = fs::read_to_string(data)?
        .lines()
        .map(|line| {
            let record: serde_json::Value = serde_json::from_str(line)?;
            Ok(record["text"].as_str().ok_or("a line without text")?.to_owned())
        })
        .collect::<Result<Vec<String>, Box<dyn Error + Send + Sync>>>()?;
    let started = Instant::now();
    let mut tokens = 0;
    for group in texts.chunks(8192) {
        let encoded = tokenizer.encode_batch_fast(group.iter().map(String::as_str).collect(), false)?;
        tokens += encoded.iter().map(|encoding| encoding.get_ids().len()).sum::<usize>();
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{tokens} tokens in {seconds:.2} s");
    Ok(())
}
