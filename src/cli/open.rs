//! From a name to a base in memory, with its tokenizer.

use std::{path::Path, sync::Arc};

use engraft_adapters::{
    BaseDescription,
    peft::{self, Loaded},
};

use super::{
    args_other::BaseArgs,
    environment::Environment,
    report, table,
    values::{BaseDtype, DeviceName, Precision},
    write_note,
};
use crate::{
    data::Tokenizer,
    device::{DType, Device, cpu::bf16},
    error::{Error, Result},
    hub::{self, HubOptions},
    model::{
        Base, BaseDType, BaseSource,
        base::{TokenizerFiles, check_weights},
    },
    train::Machine,
};

/// Name of the base that is compiled into the program.
pub const EMBEDDED: &str = "embedded";

/// Where the adapter of a run folder lies in it.
const RUN_ADAPTER: &str = "adapter";

/// A base, ready to use.
pub struct Opened {
    /// The base.
    pub base: Arc<Base>,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
}

/// What computes, and in which type of activations.
#[derive(Debug, Clone, Copy)]
pub struct Compute {
    /// The device, opened.
    pub device: Device,
    /// Type of activations.
    pub activations: DType,
}

impl Compute {
    /// The host's cores.
    pub const CPU: Self = Self { device: Device::Cpu, activations: DType::F32 };

    /// Opens what was asked for.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn open(device: Option<DeviceName>, precision: Option<Precision>) -> Result<Self> {
        let device = match device {
            Some(DeviceName::Cpu) => Device::Cpu,
            Some(DeviceName::Cuda(number)) => Device::cuda(number)?,
            Some(DeviceName::Auto) | None => Device::best(),
        };
        let usual = if device.is_host() { DType::F32 } else { DType::F16 };
        Ok(Self { device, activations: precision.map_or(usual, Precision::activations) })
    }

    fn dispatch(self) -> String {
        let plus = self.device.is_host() && self.activations == DType::BF16 && bf16();
        self.device.dispatch() + if plus { "+bf16" } else { "" }
    }

    /// What results depend on besides the options.
    pub fn machine(self) -> Machine {
        Machine {
            device: self.device.kind().to_owned(),
            precision: table::type_name(self.activations).to_owned(),
            dispatch: self.dispatch(),
        }
    }
}

/// Says what `--precision bf16` is on a CPU that gains nothing by it.
pub fn hint_at_f32() {
    if !bf16() {
        write_note("hint: --precision bf16 computes in f32 on this CPU, which has no fast BF16 products");
    }
}

/// What `--precision bf16` would gain a training of the FP16 base on a CPU with fast BF16 products, for somebody who named
/// no precision.
pub fn faster_in_bf16(precision: Option<Precision>, dtype: Option<BaseDtype>) -> Option<&'static str> {
    let halves = dtype.is_none_or(|dtype| dtype.kept() == BaseDType::F16);
    (bf16() && precision.is_none() && halves).then_some(
        "on this CPU --precision bf16 trains up to 1.9 times as fast, with the factors of products rounded to 8 bits",
    )
}

/// Finds and loads the base that `args` name, and brings it to what computes; with `stream` a device gets blocks when
/// they are needed.
///
/// # Errors
/// When it cannot be found, downloaded or read, or the device has no room for it.
pub fn base(args: &BaseArgs, environment: &Environment, compute: Compute, stream: bool) -> Result<Opened> {
    let dtype = args.base_dtype.map_or(BaseDType::F16, BaseDtype::kept);
    // Before anything is downloaded or converted.
    check_weights(compute.device.is_host(), dtype)?;
    if compute.device.is_host() && compute.activations == DType::BF16 {
        hint_at_f32();
    }
    let source = match &args.base {
        None => BaseSource::Embedded,
        Some(name) => {
            let options = hub_options(Path::new(name), args.revision.as_deref(), args, environment)?;
            let download = report::Download::new();
            hub::base(name, &options, &|progress| download.show(&progress))?
        }
    };
    let name = args.base.as_deref().unwrap_or(EMBEDDED);
    let cache = if source == BaseSource::Embedded { Path::new("") } else { environment.cache()? };
    let loaded = Base::load_as(&source, name, cache, dtype)?;
    let Compute { device, activations } = compute;
    let base =
        if stream { loaded.streamed_on(device, activations)? } else { loaded.on(device, activations)? };
    let tokenizer = match base.tokenizer_files() {
        TokenizerFiles::Folder(folder) => Tokenizer::from_folder(&folder)?,
        TokenizerFiles::Bytes(bytes) => Some(Tokenizer::from_bytes(bytes)?),
    };
    if let Some(tokenizer) = &tokenizer {
        tokenizer.check_vocabulary(base.config.vocab)?;
    }
    Ok(Opened { base: Arc::new(base), tokenizer })
}

/// The adapter that `name` (a folder or a hub id) stands for, checked against its base.
///
/// # Errors
/// When it cannot be found, downloaded or read, or belongs to another base.
pub fn adapter(
    name: &Path,
    args: &BaseArgs,
    environment: &Environment,
    base: &BaseDescription,
) -> Result<Loaded> {
    let download = report::Download::new();
    let options = hub_options(name, None, args, environment)?;
    let folder = hub::adapter(&name.display().to_string(), &options, &|progress| download.show(&progress))?;
    let loaded = peft::load(&folder, base, args.allow_base_mismatch).map_err(|error| {
        let inside = folder.join(RUN_ADAPTER);
        if inside.is_dir() {
            return Error::from(error).hint(format!("it is a run; its adapter is {}", inside.display()));
        }
        Error::from(error)
    })?;
    loaded.hints.iter().for_each(|hint| write_note(&format!("hint: {hint}")));
    Ok(loaded)
}

/// How to reach the hub; a folder that exists needs no cache for downloads.
fn hub_options(
    name: &Path,
    revision: Option<&str>,
    args: &BaseArgs,
    environment: &Environment,
) -> Result<HubOptions> {
    match environment.hub(revision, args.offline) {
        Err(_) if name.is_dir() => Ok(HubOptions::default()),
        options => options,
    }
}

/// More threads than any machine of ours has cores.
const MOST_THREADS: usize = 4096;

/// Makes the pool that kernels run on, of `threads` threads.
///
/// # Errors
/// When the number makes no sense or the system refuses the threads.
pub fn threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    if !(1..=MOST_THREADS).contains(&threads) {
        return Err(Error::input(format!(
            "--threads {threads}: is no number of threads; give 1 to {MOST_THREADS}"
        )));
    }
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|cause| {
        Error::failed(format!("--threads {threads}: cannot be started: {cause}; give fewer"))
    })
}
