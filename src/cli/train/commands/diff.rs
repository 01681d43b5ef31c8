//! `engraft diff`: the low-rank deltas of two adapters beside each other.

use std::path::PathBuf;

use clap::Args;
use engraft_adapters::{BaseDescription, DeltaSize, FoldPart, SiteDifference, compare_deltas, peft::Loaded};
use serde_json::{Value, json};

use crate::{
    cli::common::{
        adapters::base_and_adapters,
        args::BaseArgs,
        environment::Environment,
        open::Compute,
        options::Options,
        output::{write_json, write_note, write_out},
        signals,
    },
    error::{Error, Result},
};

/// Options of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// First adapter: run folder, adapter folder or hub id
    #[arg(value_name = "A")]
    pub first: PathBuf,
    /// Second adapter
    #[arg(value_name = "B")]
    pub second: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs, reason = "the options of the base are described there")]
    pub base: BaseArgs,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs `engraft diff`.
///
/// # Errors
/// When an adapter cannot be read, does not fit the base, or has no deltas.
pub fn run(args: &DiffArgs) -> Result<()> {
    signals::install()?;
    args.base.check()?;
    let environment = Environment::read()?;
    let names = [args.first.as_path(), args.second.as_path()];
    let (opened, loaded) = base_and_adapters(&names, &args.base, &environment, Compute::CPU, true)?;
    for (name, Loaded { set, .. }) in names.iter().zip(&loaded) {
        if set.loras.is_empty() {
            return Err(Error::input(format!(
                "{}: has no low-rank delta to compare; name adapters with a LoRA",
                name.display()
            )));
        }
        let others = !set.vectors.is_empty() || !set.norms.is_empty() || set.embedding.is_some();
        if others || set.prefix.is_some() || set.prompt.is_some() {
            write_note(&format!(
                "hint: {} has more than low-rank deltas of modules, which is not compared",
                name.display()
            ));
        }
    }
    let part = |index: usize| {
        let Loaded { set, values, .. } = &loaded[index];
        FoldPart { set, values, factor: 1.0 }
    };
    let base = opened.base.description();
    let found = compare_deltas([part(0), part(1)], &base);
    if args.json { write_json(&object(&found, &base)) } else { write_out(&table(&found, &base)) }
}

/// Norms, and the cosine, of all deltas of both adapters together.
fn total(found: &[SiteDifference]) -> ([f64; 2], Option<f64>) {
    let norm = |which: usize| {
        let sizes = found.iter().filter_map(|site| site.sizes[which]);
        sizes.map(|size| size.norm.powi(2)).sum::<f64>().sqrt()
    };
    let norms = [0, 1].map(norm);
    let product: f64 = found.iter().map(|site| site.product).sum();
    let lengths = norms[0] * norms[1];
    (norms, (lengths > 0.0).then(|| product / lengths))
}

fn object(found: &[SiteDifference], base: &BaseDescription) -> Value {
    let size = |size: Option<DeltaSize>| {
        size.map(|size| {
            json!({ "rank": size.rank, "norm": size.norm, "stable_rank": size.stable_rank, "used": size.used })
        })
    };
    let sites: Vec<Value> = found
        .iter()
        .map(|site| {
            json!({
                "module": base.sites[site.site].module(site.layer), "cosine": site.cosine(),
                "a": size(site.sizes[0]), "b": size(site.sizes[1]),
            })
        })
        .collect();
    let (norms, cosine) = total(found);
    json!({ "cosine": cosine, "norm_a": norms[0], "norm_b": norms[1], "sites": sites })
}

fn table(found: &[SiteDifference], base: &BaseDescription) -> String {
    let name = |site: &SiteDifference| format!("{}.{}", site.layer, base.sites[site.site].name);
    let widest = found.iter().map(|site| name(site).len()).max().unwrap_or(0).max("module".len());
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
    let ranks = |size: Option<DeltaSize>| {
        size.map_or("-".to_owned(), |size| {
            format!("{} of {} ({:.1})", size.used, size.rank, size.stable_rank)
        })
    };
    let line = |name: &str, cosine: String, norms: [String; 2], ranks: [String; 2]| {
        let [norm_a, norm_b] = norms;
        let [ranks_a, ranks_b] = ranks;
        format!("{name:<widest$}  {cosine:>6}  {norm_a:>8}  {norm_b:>8}  {ranks_a:>14}  {ranks_b:>14}\n")
    };
    let words = |[one, other]: [&str; 2]| [one.to_owned(), other.to_owned()];
    let mut text =
        line("module", "cosine".into(), words(["norm A", "norm B"]), words(["ranks A", "ranks B"]));
    for site in found {
        let norms = site.sizes.map(|size| number(size.map(|size| size.norm)));
        text += &line(&name(site), number(site.cosine()), norms, site.sizes.map(ranks));
    }
    let (norms, cosine) = total(found);
    let norms = norms.map(|norm| number(Some(norm)));
    text += line("all", number(cosine), norms, words(["", ""])).trim_end();
    text + "\nranks: how many hold 99% of the square of the norm, of those there are, and the stable rank\n"
}
