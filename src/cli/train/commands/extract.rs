//! `engraft extract`: a LoRA of what a full fine-tuning changed.

use std::path::PathBuf;

use engraft_adapters::{AdapterSet, Extracted, LoraSpec, Targets, extract, peft};
use serde_json::json;

use crate::{
    cli::common::{
        args::BaseArgs,
        environment::Environment,
        open::{self, Compute},
        options::{FROM_ONE, Options, options, switch, value},
        output::{quoted, shortened_list, write_json, write_note, write_out},
        progress::Work,
        signals,
    },
    convert::{check_output, write_card},
    error::{Error, Result},
};

options! {
    /// Options of `extract`.
    ExtractArgs { base: BaseArgs }

    "" {
        /// Hub id or folder of the model that was fine-tuned from the base
        #[arg(required = true)]
        tuned: String => value("NAME|DIR").basic();
        /// Folder of the adapter; it is new or empty
        #[arg(required = true)]
        output: PathBuf => value("DIR").basic();
        /// Rank of the LoRA
        rank: usize = 8 => value("N").check(FROM_ONE).basic();
        /// Modules: names or a regular expression between slashes, as for train
        targets: Targets = Targets::AllLinear => value("LIST").basic();
        /// One JSON object on stdout
        json: bool => switch().basic();
    }
}

/// Runs `engraft extract`.
///
/// # Errors
/// When a model cannot be read, both are of other sizes, or the folder cannot be written.
pub fn run(args: &ExtractArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    let output = args.output.clone().unwrap_or_default();
    check_output(&output)?;
    let environment = Environment::read()?;
    let base = open::base(&args.base, &environment, Compute::CPU, true)?.base;
    let tuned_args = BaseArgs { base: args.tuned.clone(), revision: None, ..args.base.clone() };
    let tuned = open::base(&tuned_args, &environment, Compute::CPU, true)?.base;
    let (before, after) = (base.source_tensors()?, tuned.source_tensors()?);
    if before.tensors() != after.tensors() {
        return Err(Error::input(format!(
            "--tuned {}: is of another size than the base {}; give the model that it was fine-tuned from as --base",
            tuned.name, base.name
        )));
    }
    let description = base.description();
    let spec = LoraSpec { targets: args.targets(), rank: args.rank(), ..LoraSpec::default() };
    let chosen = AdapterSet::new(&spec.into(), &description)?;
    if chosen.embedding.is_some() {
        return Err(Error::input(format!(
            "--targets {}: has the embedding of tokens, and deltas are made of linear modules alone; leave it out",
            args.targets()
        )));
    }
    let mut places: Vec<_> = chosen.loras.iter().map(|lora| (lora.layer, lora.site)).collect();
    places.dedup();
    let (mut done, total) = (0, places.len() as u64);
    let work = Work::new("extracting");
    let found = extract(&places, args.rank(), &description, &mut |layer, site| -> Result<Vec<f32>> {
        work.at(done, total);
        done += 1;
        let name = format!("{}.weight", description.sites[site].module(layer));
        let (before, after) = (before.read(&name)?, after.read(&name)?);
        Ok(after.iter().zip(&before).map(|(after, before)| after - before).collect())
    })?;
    drop(work);
    let others = changed_beside(
        &places,
        &description,
        &|name| Ok(before.read(name)? != after.read(name)?),
        before.tensors(),
    )?;
    if !others.is_empty() {
        write_note(&format!(
            "hint: the model changed more than these modules, which a LoRA of them does not hold: {}",
            shortened_list(&others, ", ")
        ));
    }
    peft::save(&output, &found.set, &found.values, None, &description)?;
    let lora = found.set.spec.lora.clone().unwrap_or_default();
    let rows = [
        ("method", format!("lora, rank {}, alpha {}", lora.rank, lora.alpha)),
        ("targets", lora.targets.to_string()),
        ("extracted from", tuned.name.rsplit('/').next().unwrap_or_default().to_owned()),
        ("lost by the rank", format!("{:.2}%", 100.0 * share(&found))),
    ];
    write_card(&output, &description, "Extracted from a fine-tuned model", &rows)?;
    report(args, &found, &description)
}

/// Names of changed tensors that are no weight of these places.
fn changed_beside(
    places: &[(usize, usize)],
    base: &engraft_adapters::BaseDescription,
    differs: &dyn Fn(&str) -> Result<bool>,
    tensors: &[crate::model::arch::Tensor],
) -> Result<Vec<String>> {
    let held: Vec<String> =
        places.iter().map(|&(layer, site)| format!("{}.weight", base.sites[site].module(layer))).collect();
    let mut others = Vec::new();
    for tensor in tensors.iter().filter(|tensor| !held.contains(&tensor.name)) {
        if differs(&tensor.name)? {
            others.push(tensor.name.clone());
        }
    }
    Ok(others)
}

/// Norm of what the rank does not hold, over that of all changes.
fn share(found: &Extracted) -> f64 {
    let (whole, lost) =
        found.modules.iter().fold((0.0, 0.0), |(whole, lost), one| (whole + one.1, lost + one.2));
    ratio(whole, lost)
}

fn ratio(whole: f64, lost: f64) -> f64 {
    if whole > 0.0 { (lost / whole).sqrt() } else { 0.0 }
}

fn report(args: &ExtractArgs, found: &Extracted, base: &engraft_adapters::BaseDescription) -> Result<()> {
    let output = args.output.clone().unwrap_or_default().display().to_string();
    let each = found.modules.iter().map(|&((layer, site), whole, lost)| {
        (format!("{layer}.{}", base.sites[site].name), whole.sqrt(), ratio(whole, lost))
    });
    if args.json == Some(true) {
        let modules: Vec<_> = each
            .map(|(module, norm, lost)| json!({ "module": module, "norm": norm, "lost": lost }))
            .collect();
        return write_json(&json!({
            "output": output, "rank": args.rank(), "lost": share(found), "modules": modules,
        }));
    }
    let widest = base.sites.iter().map(|site| site.name.len()).max().unwrap_or(0) + 3;
    let lines: String = each
        .map(|(module, norm, lost)| format!("{module:<widest$}  {norm:>9.3}  {:>6.2}%\n", 100.0 * lost))
        .collect();
    write_out(&format!(
        "{:<widest$}  {:>9}  {:>7}\n{lines}all modules: rank {} loses {:.2}% of the norm of the change\nwrote    \
         {output}\ntry it: engraft-infer generate --adapter {} --prompt ..\n",
        "module",
        "change",
        "lost",
        args.rank(),
        100.0 * share(found),
        quoted(&output)
    ))
}
