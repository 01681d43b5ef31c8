//! From what `--adapter` names to an adapter's folder, and to the base that it was trained on.

use std::path::{Path, PathBuf};

use engraft_adapters::{
    BaseDescription, kinds,
    peft::{self, Loaded},
};

use super::{
    args::BaseArgs,
    download::Download,
    environment::Environment,
    open::{Compute, EMBEDDED, Opened, base, hub_options},
    output::{write_detail, write_note},
};
use crate::{
    convert::foreign::{Foreign, Format, Untold},
    error::{Error, Result},
    hub, saved,
};

/// The subfolder of a run folder with its adapter.
const RUN_ADAPTER: &str = "adapter";

/// An adapter whose files are on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundAdapter {
    /// As the user named it: a folder, a run folder, a file of another format, or an id of the hub.
    pub name: PathBuf,
    /// The folder with PEFT's files, or the file or folder of another format.
    pub folder: PathBuf,
    /// Run folder and step of `RUN@STEP`: the save that holds the values. `folder` then only tells the base.
    pub save: Option<(PathBuf, u64)>,
}

/// A base as the config of an adapter names it.
#[derive(Debug)]
struct NamedBase {
    name: String,
    revision: Option<String>,
    fingerprint: Option<String>,
}

/// The base and the adapters of a command, each adapter found to fit. Where `args` name no base, it is the one
/// that the adapters name; without adapters it is the embedded one.
///
/// # Errors
/// When something cannot be found, downloaded or read, adapters do not fit, or name different bases.
pub fn base_and_adapters(
    names: &[&Path],
    args: &BaseArgs,
    environment: &Environment,
    compute: Compute,
    stream: bool,
) -> Result<(Opened, Vec<Loaded>)> {
    base_and_told_adapters(names, &Untold::default(), args, environment, compute, stream)
}

/// As [`base_and_adapters`], with what the user says of adapters whose files do not tell it.
///
/// # Errors
/// As [`base_and_adapters`].
pub fn base_and_told_adapters(
    names: &[&Path],
    untold: &Untold,
    args: &BaseArgs,
    environment: &Environment,
    compute: Compute,
    stream: bool,
) -> Result<(Opened, Vec<Loaded>)> {
    let found = names.iter().map(|name| FoundAdapter::find(name, args, environment));
    let found = found.collect::<Result<Vec<_>>>()?;
    let named = base_of(&found, "--adapter", args)?;
    let is_from_adapter = named.base != args.base;
    let opened = base(&named, environment, compute, stream).map_err(|error| match found.first() {
        Some(first) if is_from_adapter && named.base.is_some() => error
            .hint(format!("--adapter {} names this base; --base names another one", first.name.display())),
        _ => error,
    })?;
    let description = opened.base.description();
    let loaded =
        found.iter().map(|adapter| adapter.load(untold, args, &description)).collect::<Result<_>>()?;
    Ok((opened, loaded))
}

impl FoundAdapter {
    /// The adapter that `name` stands for; it is downloaded if it is an id of the hub.
    ///
    /// # Errors
    /// When it cannot be found or downloaded.
    pub fn find(name: &Path, args: &BaseArgs, environment: &Environment) -> Result<Self> {
        if let Some((run, step)) = saved::named(name) {
            let folder = inside_run(&run)?;
            return Ok(Self { name: name.to_owned(), folder, save: Some((run, step)) });
        }
        if Format::of(name).is_some() {
            return Ok(Self { name: name.to_owned(), folder: name.to_owned(), save: None });
        }
        let download = Download::new();
        let options = hub_options(name, None, args, environment)?;
        let folder =
            hub::adapter(&name.display().to_string(), &options, &|progress| download.show(&progress))?;
        Ok(Self { name: name.to_owned(), folder: inside_run(&folder)?, save: None })
    }

    /// The adapter, checked against its base.
    ///
    /// # Errors
    /// When it cannot be read, or does not fit.
    pub fn load(&self, untold: &Untold, args: &BaseArgs, base: &BaseDescription) -> Result<Loaded> {
        let mismatch = args.allow_base_mismatch == Some(true);
        let loaded = match (&self.save, Foreign::open(&self.folder)?) {
            (Some((run, step)), _) => saved::adapter(run, *step, base, mismatch)?,
            (None, Some(foreign)) => foreign.load(untold, base, mismatch)?,
            (None, None) => peft::load(&self.folder, base, mismatch)?,
        };
        loaded.hints.iter().for_each(|hint| write_note(&format!("hint: {hint}")));
        Ok(loaded)
    }

    /// The bases that its files name: one, or one for each method.
    fn bases(&self) -> Result<Vec<NamedBase>> {
        if let Some(Foreign { base, fingerprint, .. }) = Foreign::open(&self.folder)? {
            let named = |name| NamedBase { name, revision: None, fingerprint };
            return Ok(base.map(named).into_iter().collect());
        }
        let described = peft::describe(&self.folder)?.adapters.into_iter();
        let named = described.filter_map(|adapter| {
            let name = adapter.base.filter(|name| !name.trim().is_empty())?;
            Some(NamedBase { name, revision: adapter.revision, fingerprint: adapter.fingerprint })
        });
        Ok(named.collect())
    }
}

/// The folder itself, or the adapter's folder if it is a run folder.
///
/// # Errors
/// When it is a run folder that has no adapter yet.
pub fn inside_run(folder: &Path) -> Result<PathBuf> {
    let holds = |name: &str| folder.join(name).exists();
    if holds(peft::CONFIG_FILE) || kinds().iter().any(|kind| holds(kind.name)) || !holds("config.toml") {
        return Ok(folder.to_owned());
    }
    let inside = folder.join(RUN_ADAPTER);
    if inside.is_dir() {
        write_detail(&format!("adapter  {}", inside.display()));
        return Ok(inside);
    }
    let run = folder.display();
    Err(Error::input(format!(
        "{run}: is a run that has written no adapter yet; go on with it: engraft train --resume --output {run}"
    )))
}

/// `args` with the base that the adapters of `option` name, if they do not name one themselves.
///
/// # Errors
/// When they name none, different ones, or one that is not here.
pub fn base_of(adapters: &[FoundAdapter], option: &str, args: &BaseArgs) -> Result<BaseArgs> {
    if let Some(name) = &args.base {
        let is_embedded = name == EMBEDDED && !Path::new(name).is_dir();
        return Ok(BaseArgs { base: args.base.clone().filter(|_| !is_embedded), ..args.clone() });
    }
    let mut found: Option<(&FoundAdapter, NamedBase)> = None;
    for adapter in adapters {
        for base in adapter.bases()? {
            match &found {
                None => found = Some((adapter, base)),
                Some((first, other)) if !base.is(other) => {
                    return Err(two_bases(first, other, adapter, &base));
                }
                Some(_) => {}
            }
        }
    }
    let Some((adapter, base)) = found else {
        return match adapters.first() {
            None => Ok(args.clone()),
            Some(first) => Err(Error::input(format!(
                "{option} {}: names no base; give the one that it was trained on with --base",
                first.name.display()
            ))),
        };
    };
    if base.name == EMBEDDED {
        return Ok(args.clone());
    }
    let is_folder = Path::new(&base.name).is_dir();
    if !is_folder && !hub::is_id(&base.name) {
        return Err(Error::input(format!(
            "{option} {}: was trained on the base {}, which is not here; give its folder or id with --base",
            adapter.name.display(),
            base.name
        )));
    }
    write_detail(&format!("base     {}, which {} names", base.name, adapter.name.display()));
    // The commit of a base from the hub; a folder has none.
    let revision = args.revision.clone().or(base.revision.filter(|_| !is_folder));
    Ok(BaseArgs { base: Some(base.name), revision, ..args.clone() })
}

impl NamedBase {
    /// Whether both are the same base: the same weights where both tell them, else the same name.
    fn is(&self, other: &Self) -> bool {
        match (&self.fingerprint, &other.fingerprint) {
            (Some(one), Some(other)) => one == other,
            _ => self.plain_name() == other.plain_name(),
        }
    }

    /// The name without the owner that the hub knows the four GPT-2 models by.
    fn plain_name(&self) -> &str {
        self.name.strip_prefix("openai-community/").unwrap_or(&self.name)
    }
}

fn two_bases(first: &FoundAdapter, base: &NamedBase, second: &FoundAdapter, other: &NamedBase) -> Error {
    let (one, two) = (first.name.display(), second.name.display());
    let names = if base.name == other.name {
        format!("two bases that are both called {}", base.name)
    } else {
        format!("different bases, {} and {}", base.name, other.name)
    };
    Error::input(format!(
        "--adapter {one}, --adapter {two}: were trained on {names}; give adapters of one base"
    ))
    .hint("--base NAME --allow-base-mismatch uses both all the same where their shapes fit")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, fingerprint: Option<&str>) -> NamedBase {
        NamedBase { name: name.into(), revision: None, fingerprint: fingerprint.map(str::to_owned) }
    }

    #[test]
    fn bases_are_compared_by_their_weights_first() {
        assert!(named("gpt2", Some("x")).is(&named("a/folder", Some("x"))));
        assert!(!named("gpt2", Some("x")).is(&named("gpt2", Some("y"))));
        assert!(named("gpt2", Some("x")).is(&named("openai-community/gpt2", None)));
        assert!(!named("gpt2", None).is(&named("gpt2-xl", None)));
    }

    #[test]
    fn a_run_folder_stands_for_its_adapter() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path();
        assert_eq!(inside_run(folder).unwrap(), folder);
        std::fs::write(folder.join("config.toml"), "").unwrap();
        assert!(inside_run(folder).unwrap_err().to_string().contains("no adapter yet"));
        std::fs::create_dir(folder.join("adapter")).unwrap();
        assert_eq!(inside_run(folder).unwrap(), folder.join("adapter"));
    }
}
