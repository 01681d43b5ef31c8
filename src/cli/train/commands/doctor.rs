//! `engraft doctor`: what this machine has for training, and what is missing.

use std::{path::Path, time::Duration};

use clap::Args;
use serde_json::{Map, Value, json};

use crate::{
    cli::{
        common::{
            environment::Environment,
            output::{count_of, write_json, write_out},
        },
        train::cached::{CacheKind, entries, total},
    },
    device::{
        AutoDevice, DeviceKind,
        cpu::{Level, dispatch_level, level, reports_bf16},
    },
    error::Result,
    hub::{self, Reached},
    observe::machine,
    plan::{calibrate::cpu_name, size},
};

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Do not ask the hub
    #[arg(long)]
    pub offline: bool,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// How long the hub has for its answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Something that was looked at: a name, what was found, and for scripts whether it is as it should be.
struct Finding {
    name: &'static str,
    text: String,
    good: bool,
}

/// Runs `engraft doctor`.
///
/// # Errors
/// When a variable of the environment cannot be read, or the output cannot be written.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let environment = Environment::read()?;
    let findings = [
        program(),
        cpu(),
        bf16(),
        gpu(),
        memory(),
        cache(&environment),
        downloads(&environment),
        token(&environment),
        reachable(&environment, args.offline),
    ];
    if args.json {
        let field = |it: &Finding| (it.name.replace(' ', "_"), json!({ "found": it.text, "ok": it.good }));
        return write_json(&Value::Object(findings.iter().map(field).collect::<Map<_, _>>()));
    }
    let line = |it: &Finding| format!("{:<10} {}{}\n", it.name, if it.good { "" } else { "! " }, it.text);
    write_out(&findings.iter().map(line).collect::<String>())
}

fn good(name: &'static str, text: impl Into<String>) -> Finding {
    Finding { name, text: text.into(), good: true }
}

fn bad(name: &'static str, text: impl Into<String>) -> Finding {
    Finding { name, text: text.into(), good: false }
}

fn program() -> Finding {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    good("engraft", format!("{} for {os} on {arch}", env!("CARGO_PKG_VERSION")))
}

fn cpu() -> Finding {
    let threads = rayon::current_num_threads();
    let threads = count_of(threads, "thread");
    let text = |kernels: &str| format!("{}, {threads}, {kernels} ({})", cpu_name(), dispatch_level());
    match level() {
        Level::Avx512 => good("CPU", text("kernels for AVX-512")),
        Level::Avx2 => good("CPU", text("kernels for AVX2")),
        Level::Neon => good("CPU", text("kernels for NEON")),
        Level::Plain => bad("CPU", text("no kernels for its vectors, so training is several times slower")),
    }
}

fn bf16() -> Finding {
    good(
        "BF16",
        match (DeviceKind::CPU.has_fast_bf16(), reports_bf16()) {
            (true, _) => "fast: --precision bf16 trains up to 1.9 times as fast",
            (false, true) => "there, but no faster than F32 on this CPU",
            (false, false) => "none: --precision bf16 computes as f32",
        },
    )
}

fn gpu() -> Finding {
    let AutoDevice { device, refused } = AutoDevice::find();
    match (refused, device.own_memory()) {
        (Some(why), _) => bad("GPU", format!("not taken: {why}")),
        (None, Some(_)) => {
            let free = device.free().map_or(String::new(), |free| format!(", {} free", size(free)));
            let kind = device.kind();
            good("GPU", format!("{}{free}, {}", kind.label, device.dispatch(kind.default_activations)))
        }
        (None, None) => good("GPU", "none: there is no driver of an NVIDIA GPU, so the CPU computes"),
    }
}

fn memory() -> Finding {
    match (machine::available(), machine::limit()) {
        (Some(free), Some(all)) => good("memory", format!("{} free of {}", size(free), size(all))),
        _ => bad("memory", "the system does not tell what is free; give --memory SIZE"),
    }
}

fn cache(environment: &Environment) -> Finding {
    let folder = match environment.cache() {
        Ok(folder) => folder,
        Err(why) => return bad("cache", why.to_string()),
    };
    let held = entries(Some(folder), None);
    let bases = held.iter().filter(|entry| entry.kind == CacheKind::Bases).count();
    let bases = count_of(bases, "base");
    let text = format!("{}: {}, {bases}", folder.display(), size(total(&held)));
    match can_write(folder) {
        Ok(()) => good("cache", text),
        Err(why) => {
            bad("cache", format!("{text}; cannot be written: {why}; set ENGRAFT_CACHE to another folder"))
        }
    }
}

/// Tries to make a file in the folder, or in the folder that it would be made in.
fn can_write(folder: &Path) -> std::io::Result<()> {
    let there = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(folder);
    tempfile::tempfile_in(there).map(drop)
}

fn downloads(environment: &Environment) -> Finding {
    let Some(folder) = environment.hub_cache() else {
        return bad("downloads", "no folder: HOME is not set; set HOME or HF_HOME");
    };
    let held = entries(None, Some(folder));
    let models = count_of(held.len(), "repository");
    good("downloads", format!("{}: {}, {models}", folder.display(), size(total(&held))))
}

fn token(environment: &Environment) -> Finding {
    good(
        "token",
        match environment.token_source() {
            Some(source) => format!("from {source}"),
            None => "none, which public models do not need".to_owned(),
        },
    )
}

fn reachable(environment: &Environment, offline: bool) -> Finding {
    let options = match environment.hub(None, offline) {
        Ok(options) => options,
        Err(why) => return bad("hub", why.to_string()),
    };
    if options.offline {
        let why = if offline { "--offline" } else { "HF_HUB_OFFLINE" };
        return good("hub", format!("not asked ({why}): only what is downloaded is used"));
    }
    match hub::reach(&options, PATIENCE) {
        Err(why) => bad("hub", why.to_string()),
        Ok((endpoint, Reached::Yes)) => good("hub", format!("{endpoint} answers")),
        Ok((endpoint, Reached::BadToken)) => {
            bad("hub", format!("{endpoint} answers and refuses the token; set HF_TOKEN to a valid one"))
        }
        Ok((endpoint, Reached::No(why))) => {
            bad("hub", format!("{endpoint} cannot be reached: {why}; check the network, or use --offline"))
        }
    }
}
