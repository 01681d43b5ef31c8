//! `engraft export`: an adapter or a model in the format of another program.

use std::path::{Path, PathBuf};

use engraft_adapters::{
    BaseDescription, FoldPart, Folding, LoraSpec, PlainLora, from_plain, peft, peft::Loaded, plain_loras,
    whole_loras,
};
use engraft_util::atomic;
use serde_json::json;

use crate::{
    cli::common::{
        adapters::base_and_told_adapters,
        args::BaseArgs,
        environment::Environment,
        open::{Compute, Opened},
        options::{Check, Options, options, switch, unless, value},
        output::{count_of, quoted, write_json, write_out},
        progress::Work,
        signals,
        values::{ExportName, GgufTypeName, ScaledAdapter},
    },
    convert::{
        LoralibLayer, check_output,
        foreign::{Format, Untold},
        gguf::{GgufAdapter, GgufModel, GgufType},
        write_card, write_loralib, write_mlx,
    },
    error::{Error, Result},
    model::BaseDType,
    plan::size,
};

options! {
    /// Options of `export`.
    ExportArgs { base: BaseArgs }

    "" {
        /// What is written: peft, gguf, mlx, loralib or merged-gguf
        #[arg(required = true)]
        to: ExportName => value("FORMAT").basic();
        /// Run folder, adapter folder, hub id, or a file of another format, optionally with =SCALE; without it --to gguf
        /// writes the base; merged-gguf takes several
        adapter: Vec<ScaledAdapter> => value("DIR[=SCALE]").basic();
        /// File to write, which is new; for peft and mlx a folder, which is new or empty
        #[arg(required = true)]
        output: PathBuf => value("PATH").basic();
        /// Type in GGUF files: f32, f16 or, for models, q8_0 and q4_0
        dtype: GgufTypeName => value("TYPE").otherwise("f32 for adapters, f16 for models").basic();
        /// Alpha of a loralib file, which does not tell it
        lora_alpha: f64 => value("N").check(Check {
            refused: |&alpha| unless(alpha.is_finite(), alpha),
            fault: "is not finite",
            remedy: "give a number such as 16",
        });
        /// Parts that the stacked deltas of a loralib file are for, such as q,v
        enable_lora: String => value("LIST").otherwise("q,v if there are two");
        /// One JSON object on stdout
        json: bool => switch().basic();
    }
}

/// What an export has done.
struct Done {
    /// What was exported, a line.
    what: String,
    /// Bytes of the file; `None` for a folder.
    bytes: Option<u64>,
    dtype: Option<GgufType>,
    /// What the format cannot hold or what else is different from the adapter, a sentence each.
    lost: Vec<String>,
    /// How the result is used.
    next: String,
    layers: Vec<LoralibLayer>,
}

/// Runs `engraft export`.
///
/// # Errors
/// When something cannot be read, does not fit, the format cannot hold it, or the output cannot be written.
pub fn run(args: &ExportArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    let Some(to) = args.to else {
        return Err(Error::input("--to: is missing; give peft, gguf, mlx, loralib or merged-gguf"));
    };
    let output = args.output.clone().unwrap_or_default();
    let named = args.adapter.as_deref().unwrap_or_default();
    check(args, to, named, &output)?;
    let environment = Environment::read()?;
    let names: Vec<&Path> = named.iter().map(|adapter| adapter.name.as_path()).collect();
    let split = |names: &String| names.split(',').map(|name| name.trim().to_owned()).collect();
    let untold = Untold { alpha: args.lora_alpha, parts: args.enable_lora.as_ref().map(split) };
    let (opened, loaded) =
        base_and_told_adapters(&names, &untold, &args.base, &environment, Compute::CPU, true)?;
    let done = match (to, &loaded[..], named) {
        (ExportName::MergedGguf, _, _) | (ExportName::Gguf, [], _) => {
            model(args, named, &opened, &loaded, &output)?
        }
        (_, [loaded], [named]) => adapter(args, to, named, loaded, &opened, &output)?,
        _ => return Err(Error::input("--adapter: is missing; name one adapter")),
    };
    report(args, to, &opened, &output, &done)
}

/// Refuses options that do not belong together, and an output that is there.
fn check(args: &ExportArgs, to: ExportName, named: &[ScaledAdapter], output: &Path) -> Result<()> {
    let name = to.name();
    let wrong = |what: String| Err(Error::input(what));
    match (to, named.len()) {
        (ExportName::Gguf, 0) | (_, 1) => {}
        (ExportName::MergedGguf, 0) => {
            return wrong("--to merged-gguf: folds adapters into the base; name them with --adapter, or give --to gguf \
                          for the base alone"
                .to_owned());
        }
        (_, 0) => return wrong(format!("--to {name}: needs an adapter; name it with --adapter")),
        (ExportName::MergedGguf, _) => {}
        (_, count) => {
            return wrong(format!(
                "--to {name}: takes one adapter, not {count}; make one of them with engraft combine"
            ));
        }
    }
    let is_loralib = named.iter().any(|adapter| Format::of(&adapter.name) == Some(Format::Loralib));
    for (option, given) in
        [("lora-alpha", args.lora_alpha.is_some()), ("enable-lora", args.enable_lora.is_some())]
    {
        if given && !is_loralib {
            return wrong(format!("--{option}: is for .pt files of loralib alone; leave it out"));
        }
    }
    let is_gguf = matches!(to, ExportName::Gguf | ExportName::MergedGguf);
    let is_adapter = to == ExportName::Gguf && !named.is_empty();
    match args.dtype {
        Some(_) if !is_gguf => return wrong(format!("--dtype: {name} is written in f32; leave --dtype out")),
        Some(dtype @ (GgufTypeName::Q8_0 | GgufTypeName::Q4_0)) if is_adapter => {
            return wrong(format!(
                "--dtype {}: rows of a LoRA's B are shorter than a block of 32; give f32 or f16",
                dtype.dtype().name()
            ));
        }
        _ => {}
    }
    let kept = args.base.base_dtype().kept();
    if kept != BaseDType::F16 {
        return wrong(format!(
            "--base-dtype {}: an export reads the base's own files, not codes; leave it out",
            kept.name()
        ));
    }
    if matches!(to, ExportName::Peft | ExportName::Mlx) {
        return check_output(output);
    }
    let shown = output.display();
    if output.symlink_metadata().is_ok() {
        return wrong(format!("--output {shown}: is there already; name a new file"));
    }
    atomic::check(output).map_err(|error| Error::input(format!("--output {error}")))
}

/// The base as GGUF, with the adapters folded into it.
fn model(
    args: &ExportArgs,
    named: &[ScaledAdapter],
    opened: &Opened,
    loaded: &[Loaded],
    output: &Path,
) -> Result<Done> {
    for (named, loaded) in named.iter().zip(loaded) {
        let name = named.name.display();
        loaded.set.check_foldable().map_err(|cause| Error::input(format!("--adapter {name}: {cause}")))?;
        if named.scale != 1.0 && !loaded.set.is_scalable() {
            let scale = named.scale;
            return Err(Error::input(format!(
                "--adapter {name}={scale}: has no low-rank delta that could be scaled; leave ={scale} out"
            )));
        }
    }
    let parts = loaded.iter().zip(named).map(|(loaded, named)| FoldPart {
        set: &loaded.set,
        values: &loaded.values,
        factor: named.scale as f32,
    });
    let folding = Folding::new(parts.collect())?;
    let dtype = args.dtype.map_or(GgufType::F16, GgufTypeName::dtype);
    let tokenizer = opened.tokenizer.as_ref();
    let model = GgufModel { base: &opened.base, folding: &folding, tokenizer, dtype };
    let work = Work::new("exporting");
    let written = model.write(output, &|done, total| work.at(done, total))?;
    drop(work);
    let mut lost = Vec::new();
    if written.in_f16 > 0 {
        let matrices = if written.in_f16 == 1 { "matrix is" } else { "matrices are" };
        lost.push(format!("{} {matrices} in f16, because their rows are no multiple of 32", written.in_f16));
    }
    if let Some(why) = &written.without_tokenizer {
        lost.push(format!("the file has no tokenizer and takes ids alone: {why}"));
    }
    let what = match named.len() {
        0 => format!("{}: {}", opened.base.name, count_of(written.tensors, "tensor")),
        count => format!(
            "{} with {}: {} of {} changed",
            opened.base.name,
            count_of(count, "adapter"),
            written.changed,
            count_of(written.tensors, "tensor")
        ),
    };
    let next = format!("llama-cli -m {} -p ..", quoted(&output.display().to_string()));
    Ok(Done { what, bytes: Some(written.bytes), dtype: Some(dtype), lost, next, layers: Vec::new() })
}

/// One adapter in a format of adapters.
fn adapter(
    args: &ExportArgs,
    to: ExportName,
    named: &ScaledAdapter,
    loaded: &Loaded,
    opened: &Opened,
    output: &Path,
) -> Result<Done> {
    let base = opened.base.description();
    let Loaded { set, values, .. } = loaded;
    let part = FoldPart { set, values, factor: 1.0 };
    let no_lora = |cause: engraft_adapters::Error| {
        let remedy = match set.check_foldable() {
            Ok(()) => "fold it into a model with --to merged-gguf, or with engraft merge",
            Err(_) => "use it with engraft or PEFT",
        };
        Error::input(format!(
            "--adapter {}: {cause}, which --to {} needs; {remedy}",
            named.name.display(),
            to.name()
        ))
    };
    let scaled = |mut delta: PlainLora| {
        delta.alpha *= named.scale;
        delta
    };
    let read = if matches!(to, ExportName::Gguf | ExportName::Mlx) { whole_loras } else { plain_loras };
    let deltas: Vec<PlainLora> = read(&part, &base).map_err(no_lora)?.into_iter().map(scaled).collect();
    let (dropout, mut lost) = (set.dropout(), changes(to, loaded, &deltas, &base));
    let what = format!("{} for {}: {}", named.name.display(), base.name, set.matched(&base).join("; "));
    let (mut bytes, mut dtype, mut layers) = (None, None, Vec::new());
    let shown = quoted(&output.display().to_string());
    let next =
        match to {
            ExportName::Gguf => {
                let kind = args.dtype.map_or(GgufType::F32, GgufTypeName::dtype);
                dtype = Some(kind);
                bytes = Some(GgufAdapter { deltas, dropout, base: &base, dtype: kind }.write(output)?);
                format!("llama-cli -m BASE.gguf --lora {shown} -p ..")
            }
            ExportName::Mlx => {
                write_mlx(output, deltas, dropout, &base)?;
                format!("mlx_lm.generate --model {} --adapter-path {shown} --prompt ..", quoted(&base.name))
            }
            ExportName::Loralib => {
                let written = write_loralib(output, &deltas, &base)?;
                bytes = Some(written.bytes);
                layers = written.layers;
                lost.extend(layers.iter().map(|layer| {
                    format!("alpha is left out, because loralib has it in code: {}", call(layer))
                }));
                format!("model.load_state_dict(torch.load({:?}), strict=False)", output.display().to_string())
            }
            _ => {
                let made = from_plain(deltas, dropout, &named.name, &base)?;
                peft::save(output, &made.set, &made.values, None, &base)?;
                card(output, &base, named, &made.set.spec.lora.unwrap_or_default())?;
                format!("engraft-infer generate --adapter {shown} --prompt ..")
            }
        };
    Ok(Done { what, bytes, dtype, lost, next, layers })
}

/// What of an adapter is different in, or missing from, files of this format.
fn changes(to: ExportName, loaded: &Loaded, deltas: &[PlainLora], base: &BaseDescription) -> Vec<String> {
    let mut lost = Vec::new();
    if loaded.set.loras.iter().any(|lora| lora.d.is_some() || lora.e.is_some()) {
        lost.push("vectors of the ranks and columns are multiplied into A and B".to_owned());
    }
    let has_parts = loaded.set.loras.iter().any(|lora| lora.part.is_some());
    if has_parts && matches!(to, ExportName::Gguf | ExportName::Mlx) {
        lost.push("the deltas of parts are one of the whole module, in blocks".to_owned());
    }
    let differ = |of: fn(&PlainLora) -> f64| deltas.iter().any(|delta| of(delta) != of(&deltas[0]));
    let scales = match to {
        ExportName::Gguf => differ(|delta| delta.alpha),
        ExportName::Mlx => differ(PlainLora::scale),
        _ => false,
    };
    if scales {
        lost.push("there is one scale for all modules; B of the others is multiplied".to_owned());
    }
    if to == ExportName::Mlx && differ(|delta| delta.rank as f64) {
        lost.push("there is one rank for all modules; that of the others is filled up with zeros".to_owned());
    }
    if matches!(to, ExportName::Mlx | ExportName::Loralib) && base.fingerprint.is_some() {
        lost.push("the fingerprint of the base is left out".to_owned());
    }
    if to == ExportName::Loralib && loaded.set.dropout() != 0.0 {
        lost.push(format!("the dropout of training, {}, is left out", loaded.set.dropout()));
    }
    lost
}

/// The call that makes a layer of loralib.
fn call(layer: &LoralibLayer) -> String {
    let switch = |on: &bool| if *on { "True" } else { "False" };
    let (class, parts) = match layer.enable_lora.is_empty() {
        true => ("Linear", String::new()),
        false => {
            let switches: Vec<&str> = layer.enable_lora.iter().map(switch).collect();
            ("MergedLinear", format!(", enable_lora=[{}]", switches.join(", ")))
        }
    };
    format!(
        "{} = lora.{class}(.., r={}, lora_alpha={}{parts}, fan_in_fan_out=True)",
        layer.module, layer.rank, layer.alpha
    )
}

fn card(output: &Path, base: &BaseDescription, named: &ScaledAdapter, lora: &LoraSpec) -> Result<()> {
    let from = named.name.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let rows = [
        ("method", format!("lora, rank {}, alpha {}", lora.rank, lora.alpha)),
        ("targets", lora.targets.to_string()),
        ("exported from", if named.scale == 1.0 { from } else { format!("{from} x {}", named.scale) }),
    ];
    write_card(output, base, "Exported", &rows)
}

fn report(args: &ExportArgs, to: ExportName, opened: &Opened, output: &Path, done: &Done) -> Result<()> {
    let Done { what, bytes, dtype, lost, next, layers } = done;
    let (output, dtype) = (output.display().to_string(), dtype.map(GgufType::name));
    if args.json == Some(true) {
        let layers = layers.iter().map(|layer| {
            json!({
                "module": layer.module, "r": layer.rank, "lora_alpha": layer.alpha, "enable_lora": layer.enable_lora,
            })
        });
        return write_json(&json!({
            "output": output, "to": to.name(), "base": opened.base.name, "bytes": bytes, "dtype": dtype,
            "changes": lost, "layers": layers.collect::<Vec<_>>(),
        }));
    }
    let size = bytes.map(|bytes| format!(": {}", size(bytes))).unwrap_or_default();
    let dtype = dtype.map(|dtype| format!(" in {dtype}")).unwrap_or_default();
    let lost: String = lost.iter().map(|lost| format!("changed  {lost}\n")).collect();
    write_out(&format!("exported {what}\nwrote    {output}{size}{dtype}\n{lost}try it: {next}\n"))
}
