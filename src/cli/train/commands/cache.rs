//! `engraft cache`: lists what the caches hold, and removes it.

use std::{
    io::{self, BufRead, IsTerminal},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use serde_json::{Value, json};

use crate::{
    cli::{
        common::{
            environment::Environment,
            output::{count, count_of, write_error, write_json, write_note, write_out},
        },
        train::cached::{CacheEntry, CacheKind, entries, total},
    },
    error::{Error, Result},
    plan::size,
};

/// Options of `cache`.
#[derive(Debug, Args)]
pub struct CacheArgs {
    /// Remove entries: bases, tokens, speeds, hub, or several with commas; without a value the first three
    #[arg(long, value_name = "KINDS", num_args = 0..=1, value_delimiter = ',', default_missing_value = "bases,tokens,speeds")]
    pub prune: Option<Vec<CacheKind>>,
    /// Only entries that were not used for N days
    #[arg(long, value_name = "DAYS")]
    pub older_than: Option<u32>,
    /// Remove without asking
    #[arg(short, long)]
    pub yes: bool,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Runs `engraft cache`.
///
/// # Errors
/// When nobody can be asked whether to remove, or something cannot be removed.
pub fn run(args: &CacheArgs) -> Result<()> {
    let environment = Environment::read()?;
    let all = entries(environment.cache().ok(), environment.hub_cache());
    let is_old = |entry: &CacheEntry| args.older_than.is_none_or(|days| entry.age() >= DAY * days);
    let Some(kinds) = &args.prune else {
        let shown: Vec<&CacheEntry> = all.iter().filter(|entry| is_old(entry)).collect();
        if args.json {
            return write_json(&described(&shown));
        }
        let folder = |name: &str, path: Option<&std::path::Path>| {
            path.map_or(String::new(), |path| format!("{name:8}{}\n", path.display()))
        };
        let folders = folder("cache", environment.cache().ok()) + &folder("hub", environment.hub_cache());
        return write_out(&(folders + &lines(&shown)));
    };
    let chosen: Vec<&CacheEntry> =
        all.iter().filter(|entry| kinds.contains(&entry.kind) && is_old(entry)).collect();
    if !chosen.is_empty() && !args.yes && !is_confirmed(&chosen)? {
        return write_out("nothing removed\n");
    }
    let removed = remove(&chosen)?;
    if args.json {
        return write_json(&described(&removed));
    }
    write_out(&format!("removed {}, {}\n", entries_of(&removed), size(total(removed.iter().copied()))))
}

fn entries_of(entries: &[&CacheEntry]) -> String {
    count_of(entries.len(), "entry")
}

/// Removes entries but those that are being written; returns those that are gone.
fn remove<'a>(chosen: &[&'a CacheEntry]) -> Result<Vec<&'a CacheEntry>> {
    let mut removed = Vec::new();
    for &entry in chosen {
        if entry.is_in_use() {
            write_note(&format!("hint: {} is being written and stays", entry.name));
            continue;
        }
        entry.remove().map_err(|cause| {
            Error::failed(format!(
                "{}: cannot be removed: {cause}; check its permissions",
                entry.path.display()
            ))
        })?;
        removed.push(entry);
    }
    Ok(removed)
}

/// Asks on a terminal; elsewhere `--yes` is the answer.
fn is_confirmed(chosen: &[&CacheEntry]) -> Result<bool> {
    let what = format!("{} ({})", entries_of(chosen), size(total(chosen.iter().copied())));
    if !io::stdin().is_terminal() {
        return Err(Error::input(format!(
            "--prune: would remove {what}, and there is no terminal to ask on; add --yes"
        )));
    }
    write_error(lines(chosen).trim_end());
    write_error(&format!("remove {what}? [y/N]"));
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|cause| Error::failed(format!("the answer cannot be read: {cause}; add --yes")))?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// A line for each entry, and the sum.
fn lines(entries: &[&CacheEntry]) -> String {
    let line = |kind: &str, bytes: u64, used: &str, name: &str| {
        format!("{kind:<8}{:>10}  {used:<13} {name}", size(bytes)).trim_end().to_owned() + "\n"
    };
    let each =
        entries.iter().map(|entry| line(entry.kind.name(), entry.bytes, &days_ago(entry.age()), &entry.name));
    each.collect::<String>() + &line("all", total(entries.iter().copied()), "", "")
}

fn days_ago(age: Duration) -> String {
    match age.as_secs() / DAY.as_secs() {
        0 => "today".to_owned(),
        days => format!("{} ago", count(days, "day")),
    }
}

fn described(entries: &[&CacheEntry]) -> Value {
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs());
    let each = entries.iter().map(|entry| {
        json!({
            "kind": entry.kind, "name": entry.name, "path": entry.path.display().to_string(),
            "bytes": entry.bytes, "used": entry.used.and_then(seconds),
        })
    });
    json!({ "entries": each.collect::<Vec<_>>(), "bytes": total(entries.iter().copied()) })
}
