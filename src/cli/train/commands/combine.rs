//! `engraft combine`: makes one LoRA of several.

use std::path::{Path, PathBuf};

use engraft_adapters::{
    CombineMethod, CombineOptions, CombinePart, Kinds, LoraSpec, combine, peft, peft::Loaded,
};
use serde_json::json;

use crate::{
    cli::common::{
        adapters::base_and_adapters,
        args::BaseArgs,
        environment::Environment,
        open::Compute,
        options::{Check, FROM_ONE, Options, options, switch, unless, value},
        output::{quoted, write_json, write_note, write_out},
        signals,
        values::{CombineName, MajorityName, ScaledAdapter},
    },
    convert::{check_output, write_card},
    error::{Error, Result},
    model::Base,
};

options! {
    /// Options of `combine`.
    CombineArgs { base: BaseArgs }

    "" {
        /// Run folder, adapter folder or hub id, with its weight, which may be negative; repeatable
        #[arg(required = true)]
        adapter: Vec<ScaledAdapter> => value("DIR[=WEIGHT]").basic();
        /// Folder of the combined adapter; it is new or empty
        #[arg(required = true)]
        output: PathBuf => value("DIR").basic();
        /// linear, cat, svd, ties, ties_svd, dare_linear, dare_ties, dare_linear_svd, dare_ties_svd, magnitude_prune or
        /// magnitude_prune_svd, as PEFT calls them
        method: CombineName = CombineName::USUAL => value("METHOD").basic();
        /// Share of the values that ties, dare and magnitude_prune keep
        density: f64 => value("SHARE").basic().check(Check {
            refused: |&density| unless(density > 0.0 && density <= 1.0, density),
            fault: "is no share above 0 and up to 1",
            remedy: "give a number such as 0.5",
        });
        /// Rank of the result, with svd in the method
        rank: usize => value("N").otherwise("the largest rank").check(FROM_ONE).basic();
        /// How ties elects a sign: by the sum (total) or by the number of signs (frequency)
        majority_sign_method: MajorityName = MajorityName::Total => value("HOW");
        /// Seed of what dare keeps
        seed: u64 = 0 => value("N");
        /// One JSON object on stdout
        json: bool => switch().basic();
    }
}

/// Runs `engraft combine`.
///
/// # Errors
/// When adapters cannot be read or combined, an option means nothing with the method, or the folder cannot be written.
pub fn run(args: &CombineArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    let output = args.output.clone().unwrap_or_default();
    check_output(&output)?;
    let named = args.adapter.as_deref().unwrap_or_default();
    let options = options_of(args, named.len())?;
    let names: Vec<&Path> = named.iter().map(|adapter| adapter.name.as_path()).collect();
    let environment = Environment::read()?;
    let (opened, loaded) = base_and_adapters(&names, &args.base, &environment, Compute::CPU, true)?;
    refuse_other_kinds(named, &loaded)?;
    let parts: Vec<CombinePart> = loaded
        .iter()
        .zip(named)
        .map(|(Loaded { set, values, .. }, named)| CombinePart { set, values, weight: named.scale })
        .collect();
    hint_at_other_modules(&parts);
    let base = opened.base.description();
    let found = combine(&parts, &options, &base)?;
    peft::save(&output, &found.set, &found.values, None, &base)?;
    let spec = found.set.spec.lora.clone().unwrap_or_default();
    card(args, &output, &opened.base, &spec, found.lost)?;
    report(args, &output, &spec, &found.set.matched(&base), found.lost)
}

/// The options of the combination, none of which may be idle.
fn options_of(args: &CombineArgs, adapters: usize) -> Result<CombineOptions> {
    let method = args.method().0;
    let idle = |option: &str, given: bool, used: bool| match given && !used {
        true => Err(Error::input(format!(
            "--{option}: means nothing with --method {}; leave it out",
            method.name
        ))),
        false => Ok(()),
    };
    idle("density", args.density.is_some(), method.is_sparse())?;
    idle("rank", args.rank.is_some(), method.has_any_rank())?;
    idle("majority-sign-method", args.majority_sign_method.is_some(), method.elects_signs())?;
    idle("seed", args.seed.is_some(), method.is_random())?;
    if method.is_sparse() && args.density.is_none() {
        return Err(Error::input(format!(
            "--density: is missing; --method {} keeps this share of the values, such as 0.5",
            method.name
        )));
    }
    if adapters == 1 && args.rank.is_some() {
        return Err(Error::input("--rank: a single adapter is scaled and keeps its rank; leave --rank out"));
    }
    if adapters == 1 && method != CombineMethod::ALL[0] && args.method.is_some() {
        write_note("hint: a single adapter is scaled, whatever the method, as PEFT does");
    }
    let majority_sign = args.majority_sign_method().sign();
    let (density, rank, seed) = (args.density.unwrap_or(1.0), args.rank, args.seed());
    Ok(CombineOptions { method, density, rank, majority_sign, seed })
}

fn refuse_other_kinds(named: &[ScaledAdapter], loaded: &[Loaded]) -> Result<()> {
    for (named, loaded) in named.iter().zip(loaded) {
        let kinds = Kinds::of(&loaded.set.spec).map(|kinds| kinds.to_string()).unwrap_or_default();
        if kinds != LoraSpec::KIND.name {
            let name = named.name.display();
            return Err(Error::input(format!(
                "--adapter {name}: is {kinds}, and only LoRAs can be combined; give adapters that are a LoRA alone"
            )));
        }
    }
    Ok(())
}

/// A module that not all adapters have is combined of those that have it, as in PEFT.
fn hint_at_other_modules(parts: &[CombinePart]) {
    let places = |part: &CombinePart| {
        let mut places: Vec<_> = part.set.loras.iter().map(|lora| (lora.layer, lora.site)).collect();
        places.dedup();
        places
    };
    if parts.iter().any(|part| places(part) != places(&parts[0])) {
        write_note(
            "hint: the adapters have different modules; each is combined of the adapters that have it",
        );
    }
}

fn weights(args: &CombineArgs) -> Vec<String> {
    let adapters = args.adapter.iter().flatten();
    adapters.map(|adapter| format!("{} x {}", last_of(&adapter.name), adapter.scale)).collect()
}

/// The name without the folders before it, which are of this machine.
fn last_of(path: &Path) -> String {
    path.file_name().map_or_else(|| "adapter".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn card(args: &CombineArgs, output: &Path, base: &Base, spec: &LoraSpec, lost: Option<f64>) -> Result<()> {
    let mut rows = vec![
        ("method", format!("lora, rank {}, alpha {}", spec.rank, spec.alpha)),
        ("targets", spec.targets.to_string()),
        ("combined of", weights(args).join(", ")),
        ("combined by", args.method().0.name.to_owned()),
    ];
    rows.extend(args.density.map(|density| ("density", density.to_string())));
    rows.extend(lost.map(|lost| ("lost by the rank", format!("{:.2}%", 100.0 * lost))));
    write_card(output, &base.description(), "Combined", &rows)
}

fn report(
    args: &CombineArgs,
    output: &Path,
    spec: &LoraSpec,
    matched: &[String],
    lost: Option<f64>,
) -> Result<()> {
    let (method, shown) = (args.method().0.name, output.display().to_string());
    if args.json == Some(true) {
        return write_json(&json!({
            "output": shown, "method": method, "rank": spec.rank, "alpha": spec.alpha, "modules": matched,
            "lost": lost,
        }));
    }
    let lost = match lost {
        Some(lost) => {
            format!("rank     {} loses {:.2}% of the norm of the deltas\n", spec.rank, 100.0 * lost)
        }
        None => String::new(),
    };
    write_out(&format!(
        "combined {} by {method}\nadapter  lora of rank {}: {}\n{lost}wrote    {shown}\n\
         try it: engraft-infer generate --adapter {} --prompt ..\n",
        weights(args).join(", "),
        spec.rank,
        matched.join("; "),
        quoted(&shown)
    ))
}
