//! `engraft data`: what files hold, before anything is trained on them.

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    cli::{
        common::{
            args::BaseArgs,
            environment::Environment,
            open,
            options::{Options, options, switch, value},
            output::{count, write_json, write_note, write_out},
            values::SplitName,
        },
        train::{args::DataArgs, data_source},
    },
    data::{
        DataOptions, Kind, Split, Tokenizer,
        survey::{self, Shown, Survey},
    },
    embedded,
    error::Result,
    model::{Config, weights},
    train::{self, DataSource},
};

options! {
    /// Options of `data`.
    SurveyArgs { base: BaseArgs, data: DataArgs }

    "" {
        /// Files to read if a path is a folder
        split: SplitName = SplitName::Train => value("SPLIT");
        /// Held-out data to compare with; repeatable
        #[arg(num_args = 1..)]
        eval_data: Vec<PathBuf> => value("PATH");
        /// Number of records to show
        first: usize = 3 => value("N");
        /// One JSON object on stdout
        json: bool => switch();
    }
}

/// Options of `data` with its paths.
#[derive(Debug, clap::Args)]
pub struct DataCommand {
    /// As --data
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    options: SurveyArgs,
}

/// Runs `engraft data`.
///
/// # Errors
/// When the base has no tokenizer files that can be read, or the data are invalid.
pub fn run(command: &DataCommand) -> Result<()> {
    let args = &command.options;
    args.check()?;
    let environment = Environment::read()?;
    let base = open_base(&args.base, &environment)?;
    let options = data_options(args, &base, &environment)?;
    let mut paths = command.paths.clone();
    paths.extend(args.data.data.iter().flatten().cloned());
    let source = if paths.is_empty() { DataSource::Embedded } else { DataSource::Files(paths) };
    let source = data_source::fetched(source, &args.base, &environment)?;
    let split = args.split().split();
    let look =
        |source: &DataSource, split| look(source, split, base.tokenizer.as_ref(), &options, args.first());
    let found = look(&source, split)?;
    let held_out = match &args.eval_data {
        Some(paths) => {
            let paths = data_source::files(paths, &args.base, &environment)?;
            Some(look(&DataSource::Files(paths), Split::Valid)?)
        }
        None if split == Split::Train && train::brings_valid(&source)? => Some(look(&source, Split::Valid)?),
        None => None,
    };
    let held_out = held_out.map(|mut held_out| {
        held_out.compare(&found);
        held_out
    });
    if args.json == Some(true) {
        let mut object = json(&found, base.tokenizer.as_ref());
        if let Some(held_out) = &held_out {
            object["eval"] = json(held_out, base.tokenizer.as_ref());
        }
        return write_json(&object);
    }
    let page = Page {
        tokenizer: base.tokenizer.as_ref(),
        seq_len: options.seq_len,
        is_packed: options.pack,
        colour: io::stdout().is_terminal(),
    };
    write_out(&page.text(&found))?;
    if let Some(held_out) = &held_out {
        write_out(&format!("\nheld-out data\n{}", page.text(held_out)))?;
    }
    let all = [Some(&found), held_out.as_ref()].into_iter().flatten();
    all.flat_map(|survey| &survey.data.hints).for_each(|hint| write_note(&format!("hint: {hint}")));
    Ok(())
}

/// Sizes and tokenizer of a base.
struct BaseOfData {
    config: Config,
    tokenizer: Option<Tokenizer>,
}

fn open_base(args: &BaseArgs, environment: &Environment) -> Result<BaseOfData> {
    let Some(name) = &args.base else {
        let config = Config::from_json(embedded::CONFIG, Path::new("the embedded config.json"))?;
        return Ok(BaseOfData { config, tokenizer: Some(Tokenizer::from_bytes(embedded::TOKENIZER)?) });
    };
    let folder = open::tokenizer_folder(name, args, environment)?;
    Ok(BaseOfData { config: weights::read_config(&folder)?, tokenizer: Tokenizer::from_folder(&folder)? })
}

fn data_options(args: &SurveyArgs, base: &BaseOfData, environment: &Environment) -> Result<DataOptions> {
    let data = &args.data;
    Ok(DataOptions {
        seq_len: train::row_limit(data.seq_len, None, base.config.positions)?,
        pack: data.packs().unwrap_or(true),
        line_by_line: data.line_by_line == Some(true),
        train_on_prompt: data.train_on_prompt == Some(true),
        end_of_text: train::end_of_text(&base.config, base.tokenizer.as_ref())?,
        vocab: base.config.vocab,
        prompt: 0,
        spool: environment.cache().ok().map(Path::to_owned),
        read: data.read_options(None),
    })
}

fn look(
    source: &DataSource,
    split: Split,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
    first: usize,
) -> Result<Survey> {
    match source {
        DataSource::Files(paths) => survey::survey(paths, split, tokenizer, options, first),
        DataSource::Embedded => {
            let (name, text) = train::embedded_text(split);
            survey::survey_text(&name, (text, Kind::Jsonl), tokenizer, options, first)
        }
    }
}

/// Columns of the histogram's longest bar.
const BAR: usize = 40;

/// Most tokens of a record that are shown.
const SHOWN: usize = 256;

/// How a survey is shown to people.
struct Page<'a> {
    tokenizer: Option<&'a Tokenizer>,
    seq_len: usize,
    /// Whether a row holds several documents; training decides by the number of rows where no option says so.
    is_packed: bool,
    /// Whether supervised text is coloured, else it stands between marks.
    colour: bool,
}

impl Page<'_> {
    fn text(&self, survey: &Survey) -> String {
        let report = &survey.data.report;
        let forms: Vec<String> =
            survey.forms.iter().map(|(form, count)| format!("{count} of {form}")).collect();
        let mut text = format!("records  {} ({})\n", report.records, forms.join("; "));
        let share = 100.0 * report.supervised as f64 / report.tokens.max(1) as f64;
        text += &format!(
            "tokens   {}, {share:.1}% supervised; median {} a record, longest {}\n",
            report.read_tokens,
            survey.median(),
            survey.lengths.keys().next_back().unwrap_or(&0)
        );
        let full = 100.0 * report.tokens as f64 / (report.rows * self.seq_len).max(1) as f64;
        text += &format!(
            "rows     {} of up to {}, {full:.1}% full, {}\n",
            report.rows,
            count(self.seq_len as u64, "token"),
            if self.is_packed { "packed" } else { "not packed" }
        );
        let cut = 100.0 * report.cut_share();
        text += &format!("cut      {} ({cut:.2}% of the tokens)\n", count(report.truncated as u64, "record"));
        if report.dropped > 0 {
            text +=
                &format!("dropped  {} without a supervised token\n", count(report.dropped as u64, "window"));
        }
        text += "\nlength of records in tokens\n";
        text += &histogram(survey);
        for shown in &survey.first {
            text += &format!("\n{}\n{}\n", shown.place, self.record(shown));
        }
        text += &self.findings(survey);
        text
    }

    fn findings(&self, survey: &Survey) -> String {
        if survey.findings.is_empty() {
            return "\nnothing looks wrong\n".to_owned();
        }
        let mut text = "\nlooks wrong\n".to_owned();
        for (finding, found) in &survey.findings {
            let more = found.count.saturating_sub(found.examples.len());
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let places = found.examples.join(", ");
            text +=
                &format!("  {} {} ({places}{more})\n", count(found.count as u64, "record"), finding.advice());
        }
        text
    }

    /// A record with its supervised text marked.
    fn record(&self, shown: &Shown) -> String {
        let (open, close) = if self.colour { ("\x1b[1;32m", "\x1b[0m") } else { ("«", "»") };
        let mut text = String::new();
        let mut left = SHOWN;
        for (ids, supervised) in shown.stretches() {
            let ids = &ids[..ids.len().min(left)];
            left -= ids.len();
            let stretch = printable(&decoded(ids, self.tokenizer));
            match supervised && !ids.is_empty() {
                true => text += &format!("{open}{stretch}{close}"),
                false => text += &stretch,
            }
        }
        let more = shown.more + shown.ids.len().saturating_sub(SHOWN);
        if more > 0 {
            text += &format!(" .. {} more", count(more as u64, "token"));
        }
        text.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    }
}

/// The text of `ids`, or their numbers without a tokenizer.
fn decoded(ids: &[u32], tokenizer: Option<&Tokenizer>) -> String {
    tokenizer
        .and_then(|tokenizer| tokenizer.decode(ids).ok())
        .unwrap_or_else(|| ids.iter().map(|id| format!("{id} ")).collect())
}

/// `text` without characters that would move a terminal's cursor or change its colours.
fn printable(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c.to_string(),
        c if c.is_control() => c.escape_unicode().to_string(),
        c => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Lengths in ranges that double: first and last length of each range, and the number of records in it.
fn ranges(survey: &Survey) -> Vec<(usize, usize, usize)> {
    let last = survey.lengths.keys().next_back().copied().unwrap_or(0);
    let mut ranges = Vec::new();
    let (mut from, mut to) = (0, 8);
    while from <= last {
        ranges.push((from, to, survey.lengths.range(from..=to).map(|(_, count)| count).sum()));
        (from, to) = (to + 1, 2 * to);
    }
    let empty = ranges.iter().take_while(|(.., count)| *count == 0).count();
    ranges.split_off(empty.min(ranges.len().saturating_sub(1)))
}

fn histogram(survey: &Survey) -> String {
    let ranges = ranges(survey);
    let most = ranges.iter().map(|(.., count)| *count).max().unwrap_or(0).max(1);
    let line = |(from, to, count): &(usize, usize, usize)| {
        // At least a mark for any record at all.
        let bar = "#".repeat((count * BAR).div_ceil(most));
        format!("{from:>9} - {to:<9} {count:>9}  {bar}").trim_end().to_owned() + "\n"
    };
    ranges.iter().map(line).collect()
}

fn json(survey: &Survey, tokenizer: Option<&Tokenizer>) -> Value {
    let shown = |shown: &Shown| {
        let part = |(ids, supervised): (&[u32], bool)| json!({ "text": tokenizer.map(|_| decoded(ids, tokenizer)), "ids": ids, "supervised": supervised });
        let parts: Vec<Value> = shown.stretches().into_iter().map(part).collect();
        json!({ "place": shown.place, "parts": parts, "more_tokens": shown.more })
    };
    let range =
        |(from, to, count): (usize, usize, usize)| json!({ "from": from, "to": to, "records": count });
    let findings = survey.findings.iter().map(|(finding, found)| {
        json!({ "kind": finding.name(), "records": found.count, "places": found.examples })
    });
    let report = &survey.data.report;
    json!({
        "report": report,
        "forms": survey.forms,
        "supervised_share": report.supervised as f64 / report.tokens.max(1) as f64,
        "cut_share": report.cut_share(),
        "median": survey.median(),
        "longest": survey.lengths.keys().next_back(),
        "lengths": ranges(survey).into_iter().map(range).collect::<Vec<_>>(),
        "first": survey.first.iter().map(shown).collect::<Vec<_>>(),
        "findings": findings.collect::<Vec<_>>(),
        "hints": survey.data.hints,
        "fingerprint": survey.data.fingerprint,
    })
}
