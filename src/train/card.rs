//! The model card of an adapter: `README.md` in its folder, in the form that the hub and PEFT read.
//!
//! It tells base, method, data, settings and losses, and no path of this machine. It is written after the adapter's
//! files: a crash between the two leaves the card of the save before.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use engraft_adapters::{AdapterSpec, BaseDescription, Kinds};
use engraft_util::{
    atomic,
    words::{count, count_of, short_hash},
};

use super::{
    DataSource, Event, Length, Reporter, RunOptions, Warmup,
    prepare::Prepared,
    record::{Line, metrics},
};
use crate::{
    data::DataReport,
    error::Result,
    optim::schedule::{Decay, Schedule},
};

/// Name of the file.
pub const CARD: &str = "README.md";

/// Stands in every card that engraft wrote. A card without it is its user's, and is kept.
const MARK: &str = "<!-- Written by engraft with every save. Remove this line to keep your changes. -->";

/// Losses of a run, as far as they are known.
#[derive(Debug, Clone, Default, PartialEq)]
struct Losses {
    /// Mean loss over the held-out rows before the first step.
    before: Option<f64>,
    /// The last such loss after it, with its step.
    evaluated: Option<(u64, f64)>,
    /// Mean loss over the rows of the last step.
    trained: Option<f64>,
}

impl Losses {
    /// The losses on the record of the run in `folder`; none where it has no record.
    fn on_record(folder: &Path) -> Self {
        let mut losses = Self::default();
        let read = metrics::read(folder, &mut |stamped| match stamped.line {
            Line::Step(step) => losses.trained = Some(step.loss),
            Line::Eval(eval) => losses.evaluation(eval.step, eval.loss),
            _ => {}
        });
        // Runs of earlier versions have none: their cards lack what was before.
        read.map_or_else(|_| Self::default(), |()| losses)
    }

    fn evaluation(&mut self, step: u64, loss: f64) {
        match step {
            0 => self.before = Some(loss),
            _ => self.evaluated = Some((step, loss)),
        }
    }
}

/// Passes events on, and writes the card of the adapter with every save and at the end.
pub(super) struct CardWriter<'a> {
    inner: &'a mut dyn Reporter,
    card: Card<'a>,
    /// The run folder.
    folder: PathBuf,
}

impl<'a> CardWriter<'a> {
    pub fn new(inner: &'a mut dyn Reporter, card: Card<'a>, folder: &Path) -> Self {
        let losses = if card.step > 0 { Losses::on_record(folder) } else { Losses::default() };
        Self { inner, card: Card { losses, ..card }, folder: folder.to_owned() }
    }

    /// Writes the card, if there is an adapter for it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self) -> Result<()> {
        let adapter = self.folder.join(ADAPTER);
        if adapter.is_dir() { write(&adapter, &self.card) } else { Ok(()) }
    }
}

impl Reporter for CardWriter<'_> {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Step(step) => {
                self.card.step = step.step;
                self.card.losses.trained = Some(step.loss);
            }
            Event::Eval(eval) => {
                self.card.losses.evaluation(eval.step, eval.loss);
                let best = self.folder.join(BEST);
                if eval.best == Some(true) && self.card.options.save_best && best.is_dir() {
                    write(&best, &self.card)?;
                }
            }
            Event::Saved(_) | Event::Done(_) => self.write()?,
            _ => {}
        }
        self.inner.event(event)
    }
}

/// The adapter's folder in a run folder.
const ADAPTER: &str = "adapter";

/// The folder of the best adapter in a run folder.
const BEST: &str = "best";

/// What a card tells.
#[derive(Debug)]
pub(super) struct Card<'a> {
    /// The base that the adapter is for.
    base: BaseDescription,
    /// Methods and options of the adapter.
    spec: &'a AdapterSpec,
    /// Number of trained values.
    trainables: usize,
    /// Options of the run.
    options: &'a RunOptions,
    /// Counts of the training data.
    data: DataReport,
    /// Most tokens of a row.
    seq_len: usize,
    /// Optimizer steps done.
    step: u64,
    /// Optimizer steps of the whole run.
    steps: u64,
    losses: Losses,
}

/// Writes `card` into the adapter's folder, unless the card there is not ours.
///
/// # Errors
/// When it cannot be written.
fn write(folder: &Path, card: &Card) -> Result<()> {
    let path = folder.join(CARD);
    let text = card.text();
    match fs::read_to_string(&path) {
        Ok(old) if old == text || !old.contains(MARK) => Ok(()),
        _ => Ok(atomic::write(&path, text.as_bytes())?),
    }
}

impl<'a> Card<'a> {
    /// The card of a run that has done `step` steps.
    pub fn new(options: &'a RunOptions, base: BaseDescription, prepared: &'a Prepared, step: u64) -> Self {
        Self {
            base,
            spec: &prepared.set.spec,
            trainables: prepared.set.trainables(),
            options,
            data: prepared.train.report,
            seq_len: prepared.seq_len,
            step,
            steps: prepared.steps,
            losses: Losses::default(),
        }
    }

    /// The text of the file, YAML header included.
    fn text(&self) -> String {
        let base = self.base_name();
        let kinds = Kinds::of(self.spec);
        let kinds = kinds.as_ref().map_or(&[][..], Kinds::names);
        let method = kinds.join(" and ");
        let mut text = self.header(kinds);
        let _ = write!(text, "\n{MARK}\n\n# {method} adapter for {base}\n\n");
        let _ = writeln!(
            text,
            "Trained with engraft {}. The folder holds the files of PEFT.\n",
            env!("CARGO_PKG_VERSION")
        );
        text += "| | |\n|---|---|\n";
        for (name, value) in self.rows() {
            let _ = writeln!(text, "| {name} | {} |", value.replace('|', "\\|"));
        }
        text += &self.use_in_engraft();
        text += &self.use_in_peft(kinds);
        text
    }

    /// The header that the hub reads: only an id of the hub is a base that it knows.
    fn header(&self, kinds: &[&str]) -> String {
        let mut header = "---\n".to_owned();
        let mut tags = Vec::new();
        if let Some(id) = self.hub_id() {
            let _ = writeln!(header, "base_model: {id}");
            tags.push(format!("base_model:adapter:{id}"));
        }
        header += "library_name: peft\npipeline_tag: text-generation\ntags:\n";
        tags.extend(["engraft".to_owned(), "transformers".to_owned()]);
        tags.extend(kinds.iter().map(|kind| (*kind).to_owned()));
        tags.sort();
        tags.iter().for_each(|tag| {
            let _ = writeln!(header, "- {tag}");
        });
        header + "---\n"
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let options = self.options;
        let mut rows = vec![("base", self.base_name())];
        rows.extend(
            self.base
                .revision
                .as_ref()
                .map(|revision| ("commit of the base", short_hash(revision).to_owned())),
        );
        rows.extend(
            self.base
                .fingerprint
                .as_ref()
                .map(|print| ("fingerprint of the base", short_hash(print).to_owned())),
        );
        for (name, value) in self.spec.lines() {
            rows.push((if name == "kind" { "method" } else { name }, value));
        }
        if let Some(dir) = &options.init_adapter {
            rows.push(("started from", last_of(dir)));
        }
        rows.push(("trained values", self.trainables.to_string()));
        rows.push(("data", format!("{}: {}", self.data_names(), self.data)));
        let length = match options.length {
            Length::Steps(_) | Length::FromData => String::new(),
            Length::Epochs(epochs) => format!(" ({epochs} epochs)"),
        };
        rows.push((
            "steps",
            format!(
                "{} of {}{length}, {} each, rows of up to {}",
                self.step,
                self.steps,
                count_of(options.batch, "row"),
                count_of(self.seq_len, "token")
            ),
        ));
        rows.push(("learning rate", self.learning_rate()));
        rows.push(("seed", options.seed.to_string()));
        rows.push(("computed on", format!("{} in {}", options.machine.device, options.machine.precision)));
        rows.extend(self.losses.trained.map(|loss| ("loss of the last step", format!("{loss:.4}"))));
        rows.extend(self.losses.before.map(|loss| ("evaluation loss before", with_perplexity(loss))));
        let evaluated = self.losses.evaluated;
        rows.extend(
            evaluated
                .map(|(step, loss)| ("evaluation loss", format!("{} at step {step}", with_perplexity(loss)))),
        );
        rows
    }

    fn learning_rate(&self) -> String {
        let options = self.options;
        let Schedule { lr, min_lr, decay } = options.schedule;
        let schedule = match decay {
            Decay::Constant => "constant".to_owned(),
            Decay::CosineWithRestarts(cycles) => format!("{cycles} cosines"),
            Decay::InverseSqrt => "inverse square root".to_owned(),
            other => format!("{other:?} decay").to_lowercase(),
        };
        let least = if min_lr > 0.0 { format!(" to {min_lr}") } else { String::new() };
        let warmup = match options.warmup {
            Warmup::Steps(0) => String::new(),
            warmup => format!(", warm-up {}", count(warmup.steps(self.steps), "step")),
        };
        format!("{lr}, {schedule}{least}{warmup}, weight decay {}", options.adamw.weight_decay)
    }

    /// File names of the data without their folders.
    fn data_names(&self) -> String {
        match &self.options.data {
            DataSource::Embedded => "the example data of engraft".to_owned(),
            DataSource::Files(files) => {
                let names: Vec<String> = files.iter().map(|file| last_of(file)).collect();
                let shown = names.iter().take(MOST_NAMES).cloned().collect::<Vec<_>>().join(", ");
                match names.len().saturating_sub(MOST_NAMES) {
                    0 => shown,
                    more => format!("{shown} and {more} more"),
                }
            }
        }
    }

    /// The base's id on the hub; none for a folder and for the embedded base.
    fn hub_id(&self) -> Option<&str> {
        let name = self.base.name.as_str();
        let is_folder = Path::new(name).is_absolute() || Path::new(name).is_dir();
        (name != EMBEDDED && !is_folder).then_some(name)
    }

    /// The base's name as others may read it: of a folder its own name alone.
    fn base_name(&self) -> String {
        match self.hub_id() {
            Some(id) => id.to_owned(),
            None if self.base.name == EMBEDDED => "the embedded base of engraft".to_owned(),
            None => format!("{} (a folder)", last_of(Path::new(&self.base.name))),
        }
    }

    fn use_in_engraft(&self) -> String {
        let base = if self.hub_id().is_some() || self.base.name == EMBEDDED { "" } else { " --base BASE" };
        format!(
            "\n## Use it in engraft\n\nIn this folder{}:\n\n    \
             engraft-infer generate{base} --adapter . --prompt \"Once\"\n",
            if base.is_empty() { "" } else { ", with the folder of the base for BASE" }
        )
    }

    fn use_in_peft(&self, kinds: &[&str]) -> String {
        let base = self.hub_id().unwrap_or("BASE");
        let revision = match &self.base.revision {
            Some(revision) if self.hub_id().is_some() => format!(", revision=\"{revision}\""),
            _ => String::new(),
        };
        let mut text = "\n## Use it in PEFT\n\n".to_owned();
        if self.hub_id().is_none() {
            text += match self.base.name.as_str() {
                EMBEDDED => "BASE is `examples/base` of engraft's sources.\n\n",
                _ => "BASE is the folder of the base.\n\n",
            };
        }
        let _ = write!(
            text,
            "    from peft import PeftModel\n    from transformers import AutoModelForCausalLM\n\n    \
             model = AutoModelForCausalLM.from_pretrained(\"{base}\"{revision})\n"
        );
        match kinds {
            [_] => text += "    model = PeftModel.from_pretrained(model, \".\").eval()\n",
            _ => {
                for (index, kind) in kinds.iter().enumerate() {
                    let fold = if index + 1 < kinds.len() { "merge_and_unload()" } else { "eval()" };
                    let _ = writeln!(text, "    model = PeftModel.from_pretrained(model, \"{kind}\").{fold}");
                }
            }
        }
        text
    }
}

/// Name of the base that is compiled into the program.
const EMBEDDED: &str = "embedded";
/// Data files that are named.
const MOST_NAMES: usize = 3;
/// The last part of a path.
fn last_of(path: &Path) -> String {
    path.file_name().map_or_else(|| "data".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn with_perplexity(loss: f64) -> String {
    format!("{loss:.4} (perplexity {:.2})", loss.exp())
}
