//! Loads data as training does, and prints the counts, the time and the growth of the peak resident set.
//!
//!     cargo run --release --example load -- TOKENIZER_DIR DATA SEQ_LEN [SPOOL_DIR]
//!
//! Rows of more than 1 MiB go to a nameless file in SPOOL_DIR, without it they stay on the heap. Linux only:
//! the peak is read from /proc.

use std::{error::Error, fs, path::PathBuf, time::Instant};

use engraft::data::{DataOptions, ReadOptions, Split, Tokenizer, load};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, data, seq_len, rest @ ..] = &arguments[..] else {
        return Err("give TOKENIZER_FOLDER DATA SEQ_LEN [SPOOL_FOLDER]".into());
    };
    let tokenizer = Tokenizer::from_folder(folder.as_ref())?.ok_or("no tokenizer in the folder")?;
    let options = DataOptions {
        seq_len: seq_len.parse()?,
        pack: true,
        line_by_line: false,
        train_on_prompt: false,
        end_of_text: tokenizer.end_of_text(None).ok_or("no end-of-text token")?,
        vocab: tokenizer.vocab_size(),
        prompt: 0,
        spool: rest.first().map(PathBuf::from),
        read: ReadOptions::default(),
    };
    let before = peak()?;
    let started = Instant::now();
    let rows = load(&[PathBuf::from(data)], Split::Train, Some(&tokenizer), &options)?;
    let seconds = started.elapsed().as_secs_f64();
    let grown = (peak()? - before) as f64 / 1024.0;
    println!("{} in {seconds:.2} s, peak grew by {grown:.1} MiB", rows.report);
    let (heap, mapped) = rows.memory();
    println!("{heap} bytes on the heap, {mapped} mapped, fingerprint {}", rows.fingerprint);
    Ok(())
}

/// Highest resident set of this process so far, in KiB.
fn peak() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
