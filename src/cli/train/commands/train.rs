//! `engraft train`: joins the layers of options, opens the base, runs.

use std::path::Path;

use crate::{
    cli::{
        common::{
            adapters::{FoundAdapter, base_of, inside_run},
            environment::Environment,
            open::{self, Compute},
            options::{Facts, OnResume, Options},
            output::write_note,
            signals,
        },
        train::{
            args::TrainArgs,
            closing, config_file, data_source, layers,
            report::{HumanReporter, JsonReporter, write_line},
            report_page, resolve,
        },
    },
    convert::foreign::Format,
    embedded,
    error::{Error, Result, TILDE},
    observe::trace,
    train::{
        self, AdapterOptions, Event, Reporter, RunFolder, folder,
        record::{self, Line},
        save::{self, SaveInfo},
    },
};

/// Runs `engraft train`. With `--json` a failure is an event, too.
///
/// # Errors
/// The errors of [`train::run`].
pub fn run(typed: TrainArgs) -> Result<()> {
    let mut json = typed.json == Some(true);
    let result = go(typed, &mut json);
    if json
        && let Err(error) = &result
        && let Some(line) = Line::error(None, error)
    {
        // Standard error has it in any case.
        let _ = write_line(line);
    }
    result
}

/// As [`run`]; `is_json` becomes what a config file says of it.
fn go(typed: TrainArgs, is_json: &mut bool) -> Result<()> {
    signals::install()?;
    signals::end_at_once("interrupted before the first step; run the command again");
    let mut args = joined(typed)?;
    *is_json = args.json == Some(true);
    args.base.base = args.base.base.as_deref().map(layers::base_name).transpose()?;
    let environment = Environment::read()?;
    let cache = environment.cache().ok().map(Path::to_owned);
    let compute = Compute::open(args.compute.device, args.compute.precision)?;
    resolve::refuse_missing_data(&args)?;
    let mut options = resolve::run_options(&args, resolve::machine(compute), cache)?;
    options.data = data_source::fetched(options.data, &args.base, &environment)?;
    options.eval_data = data_source::files(&options.eval_data, &args.base, &environment)?;
    resolve::check_data(&options)?;
    open::threads(args.compute.threads)?;
    // Made and locked before anything is read: what cannot be written is told at once, and two processes never
    // get the same folder.
    let folder = match &args.output {
        Some(output) => RunFolder::look(output, options.resume)?,
        None => RunFolder::first_free("runs".as_ref(), &resolve::default_name(&args))?,
    };
    if let Some(path) = &options.memory_trace {
        trace::check(path)?;
    }
    let opened = open::base(&args.base, &environment, compute, options.constraints.stream == Some(true))?;
    let json = *is_json;
    let reporter: Box<dyn Reporter> = if json {
        options.read.watch = JsonReporter::reading();
        Box::new(JsonReporter::new())
    } else {
        // A run that goes on has its precision.
        let kind = compute.device.kind();
        let faster = (!options.resume)
            .then(|| open::faster_in_bf16(kind, args.compute.precision, args.base.base_dtype))
            .flatten();
        let hints = own_data_on_embedded_base(&args).into_iter().chain(faster).collect();
        let reporter = HumanReporter::new(args.log_every(), hints);
        options.read.watch = reporter.reading();
        Box::new(reporter)
    };
    let (base, tokenizer) = (&opened.base, opened.tokenizer.as_ref());
    let output = folder.path().to_owned();
    let mut reporter = Begun { reporter, has_begun: false };
    let finished = train::run(&options, base, tokenizer, folder, &mut reporter, signals::flag());
    signals::end_at_once("interrupted; the adapter is written");
    let has_begun = reporter.has_begun;
    // Ends a bar before anything else is printed.
    drop(reporter);
    let closed = finished.and_then(|finished| match json {
        true => Ok(()),
        false => {
            let samples = closing::show(&finished, &opened, args.base.base.as_deref())?;
            // The adapter is finished: nothing that is written about it fails the run.
            let _ = record::add_samples(&output, samples);
            Ok(())
        }
    });
    // Also of a run that stopped early: its user wants to see how far it came.
    if has_begun && let Err(error) = report_page::write(&output) {
        write_note(&format!("hint: there is no report of this run: {error}"));
    } else if has_begun && !json {
        write_note(&format!("report: {}", report_page::path(&output).display()));
    }
    closed
}

/// Passes events on, knows whether the run began, and has signals ask the loop to stop from then on.
struct Begun {
    reporter: Box<dyn Reporter>,
    has_begun: bool,
}

impl Reporter for Begun {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        if matches!(event, Event::Start(_)) {
            self.has_begun = true;
            // From here on a signal asks the loop to stop.
            signals::watch();
        }
        self.reporter.event(event)
    }
}

/// The hint for a run of the embedded base on the user's own data.
fn own_data_on_embedded_base(args: &TrainArgs) -> Option<&'static str> {
    (args.base.base.is_none() && args.data.data.is_some()).then_some(
        "the embedded base knows little beyond its examples; --base gpt2, or a folder, is for your own data",
    )
}

/// Command line over `--config` over the run folder's config over the embedded defaults over the defaults.
pub(super) fn joined(mut typed: TrainArgs) -> Result<TrainArgs> {
    if typed.resume_from.is_some() {
        typed.resume = Some(true);
    }
    let mut layers = vec![typed];
    if let Some(path) = layers[0].config.clone() {
        layers.push(config_file::read(&path)?);
    }
    let so_far = layers::join(&layers)?;
    if so_far.resume.unwrap_or(false) {
        let output = so_far
            .output
            .as_deref()
            .ok_or_else(|| Error::input("--resume: needs to know the run; name its folder with --output"))?;
        layers.push(of_run_folder(output)?);
    }
    let so_far = layers::join(&layers)?;
    if so_far.base.base.is_none() && so_far.data.data.is_none() {
        let kinds = so_far.method.clone().unwrap_or_else(AdapterOptions::default_kinds);
        layers.push(config_file::parse(embedded::defaults(&kinds), "the embedded defaults")?);
    }
    let mut args = layers::with_defaults(layers::join(&layers)?);
    refuse_tilde(&args)?;
    look_into_init_adapter(&mut args)?;
    Ok(args)
}

/// Refuses paths that begin with `~`, which no shell has expanded: a folder of that name would be made.
fn refuse_tilde(args: &TrainArgs) -> Result<()> {
    let table = config_file::table(args)?;
    let is_path = |facts: &Facts| ["PATH", "DIR", "FILE"].iter().any(|kind| facts.value.contains(kind));
    for facts in TrainArgs::facts().iter().filter(|facts| is_path(facts)) {
        let values = match table.get(&facts.name) {
            Some(toml::Value::Array(items)) => items.as_slice(),
            Some(value) => std::slice::from_ref(value),
            None => &[],
        };
        let homeless = |path: &&str| path.starts_with("~/") && !Path::new("~").exists();
        if let Some(path) = values.iter().filter_map(toml::Value::as_str).find(homeless) {
            return Err(Error::input(format!("--{} {path}: {TILDE}", facts.name)));
        }
    }
    Ok(())
}

/// Takes the adapter of a run folder in `--init-adapter`, and for a new run without `--base` the base that it names.
fn look_into_init_adapter(args: &mut TrainArgs) -> Result<()> {
    let Some(folder) = &args.init_adapter else { return Ok(()) };
    let found = FoundAdapter { name: folder.clone(), folder: inside_run(folder)?, save: None };
    if args.resume != Some(true) && (found.folder.is_dir() || Format::of(&found.folder).is_some()) {
        args.base = base_of(std::slice::from_ref(&found), "--init-adapter", &args.base)?;
    }
    args.init_adapter = Some(found.folder);
    Ok(())
}

/// The options of the run in `output`, from its config, or where that is gone from its newest save.
fn of_run_folder(output: &Path) -> Result<TrainArgs> {
    folder::check_run(output)?;
    let path = folder::config_path(output);
    if path.exists() {
        return config_file::read(&path);
    }
    write_note(&format!(
        "hint: {} is missing; the options are those of the newest save, name --base and --data if the run had them",
        path.display()
    ));
    match save::newest(&folder::saves(output))? {
        None => Ok(TrainArgs::default()),
        Some((save, _)) => config_file::parse(
            &options_of_save(&save.info),
            &format!("the newest save of {}", output.display()),
        ),
    }
}

/// The options that a save knows, as a config file. It leaves out switches that are off.
fn options_of_save(save: &SaveInfo) -> String {
    let given = save.options.iter().map(|(name, value)| format!("{name} = {value}\n"));
    let is_off = |facts: &Facts| {
        let is_on_by_default = facts.value == "BOOL" && facts.default.as_deref() == Some("true");
        is_on_by_default && facts.on_resume == OnResume::Same && !save.options.contains_key(&facts.name)
    };
    let off = TrainArgs::facts().into_iter().filter(is_off).map(|facts| format!("{} = false\n", facts.name));
    given.chain(off).chain([format!("steps = {}\n", save.steps)]).collect()
}
