//! From a name to a base in memory, with its tokenizer.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    args::BaseArgs,
    download::Download,
    environment::Environment,
    output::{write_detail, write_note},
    progress::Work,
    values::{BaseDtypeName, DeviceName, Precision},
};
use crate::{
    data::Tokenizer,
    device::{DType, Device, DeviceKind},
    error::{Error, Result},
    hub::{self, HubOptions},
    model::{Base, BaseDType, BaseSource, base::TokenizerFiles, weights},
};

/// Name of the base that is compiled into the program.
pub const EMBEDDED: &str = "embedded";

/// A base, ready to use.
pub struct Opened {
    /// The base on its device.
    pub base: Arc<Base>,
    /// Its tokenizer, if it has one.
    pub tokenizer: Option<Tokenizer>,
}

/// The device, and the type of activations on it.
#[derive(Debug, Clone, Copy)]
pub struct Compute {
    /// The opened device.
    pub device: Device,
    /// Element type of activations.
    pub activations: DType,
}

impl Compute {
    /// The host's cores in F32.
    pub const CPU: Self = Self { device: Device::HOST, activations: DType::F32 };

    /// Opens what was asked for.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn open(device: Option<DeviceName>, precision: Option<Precision>) -> Result<Self> {
        let device = device.unwrap_or(DeviceName::Auto).open()?;
        let default = device.kind().default_activations;
        Ok(Self { device, activations: precision.map_or(default, Precision::activations) })
    }

    /// The instructions that compute: bits differ between these.
    pub fn dispatch(self) -> String {
        self.device.dispatch(self.activations)
    }
}

/// Says that `--precision bf16` gains nothing on a CPU without fast BF16 products.
pub fn hint_at_f32(kind: &DeviceKind, activations: DType) {
    if activations == DType::BF16 && !kind.has_fast_bf16() {
        write_note("hint: --precision bf16 computes in f32 on this CPU, which has no fast BF16 products");
    }
}

/// A hint at `--precision bf16` for a training of the FP16 base without a precision, on a CPU with fast BF16
/// products.
pub fn faster_in_bf16(
    kind: &DeviceKind,
    precision: Option<Precision>,
    dtype: Option<BaseDtypeName>,
) -> Option<&'static str> {
    let f16_base = dtype.is_none_or(|dtype| dtype.kept() == BaseDType::F16);
    let is_faster = kind.default_activations == DType::F32 && kind.has_fast_bf16();
    (is_faster && precision.is_none() && f16_base).then_some(
        "on this CPU --precision bf16 trains up to 1.9 times as fast, with the factors of products rounded to 8 \
         bits",
    )
}

/// Finds and loads the base that `args` name, and copies it to the device; with `stream` blocks follow when they
/// are needed.
///
/// # Errors
/// When it cannot be found, downloaded or read, or the device has no room for it.
pub fn base(args: &BaseArgs, environment: &Environment, compute: Compute, stream: bool) -> Result<Opened> {
    args.refuse_revision()?;
    if let Ok(cache) = environment.cache() {
        weights::remove_leftovers(cache);
    }
    let dtype = args.base_dtype().kept();
    hint_at_f32(compute.device.kind(), compute.activations);
    let is_embedded = |name: &&String| *name == EMBEDDED && !Path::new(name).is_dir();
    let source = match args.base.as_ref().filter(|name| !is_embedded(name)) {
        None => BaseSource::Embedded,
        Some(name) => {
            let options = hub_options(Path::new(name), args.revision.as_deref(), args, environment)?;
            let download = Download::new();
            let folder = hub::base(name, &options, &|progress| download.show(&progress))?;
            write_detail(&format!("base     {name} in {}", folder.display()));
            BaseSource::Folder(folder)
        }
    };
    let name = args.base.as_deref().unwrap_or(EMBEDDED);
    let cache = if source == BaseSource::Embedded { Path::new("") } else { environment.cache()? };
    let work = Work::new("reading the base for the first time");
    let loaded = Base::load_with(&source, name, cache, dtype, &|done, total| work.at(done, total))?;
    drop(work);
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

/// A folder with the config and the tokenizer of the base that `args` name; of a model of the hub without weights.
///
/// # Errors
/// When it cannot be found or downloaded.
pub fn tokenizer_folder(name: &str, args: &BaseArgs, environment: &Environment) -> Result<PathBuf> {
    let options = hub_options(Path::new(name), args.revision.as_deref(), args, environment)?;
    let download = Download::new();
    hub::tokenizer(name, &options, &|progress| download.show(&progress))
}

/// What begins the name of a data file on the hub.
pub const HUB: &str = "hub:";

/// Whether `path` is the name of a file on the hub: `hub:owner/name/file`, perhaps with a weight.
pub fn is_on_hub(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with(HUB)) && !path.exists()
}

/// `path`, or where the file of the hub that it names is in the cache; a weight after the name stays.
///
/// # Errors
/// When it cannot be found or downloaded.
pub fn data_file(path: &Path, offline: bool, environment: &Environment) -> Result<PathBuf> {
    let Some(name) = path.to_str().and_then(|text| text.strip_prefix(HUB)).filter(|_| is_on_hub(path)) else {
        return Ok(path.to_owned());
    };
    let (name, weight) = match name.rsplit_once(':') {
        Some((name, weight)) if weight.parse::<f64>().is_ok() => (name, format!(":{weight}")),
        _ => (name, String::new()),
    };
    let mut parts = name.splitn(3, '/');
    let (Some(owner), Some(set), Some(file)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(Error::input(format!("{}: names no file; give hub:owner/name/file", path.display())));
    };
    let (set, revision) = set.split_once('@').map_or((set, None), |(set, revision)| (set, Some(revision)));
    let options = environment.hub(revision, offline)?;
    let download = Download::new();
    let found =
        hub::data_file(&format!("{owner}/{set}"), file, &options, &|progress| download.show(&progress))?;
    let mut found = found.into_os_string();
    found.push(weight);
    Ok(found.into())
}

/// How to reach the hub; a folder that exists needs no cache for downloads.
///
/// # Errors
/// When no variable tells a folder for downloads.
pub fn hub_options(
    name: &Path,
    revision: Option<&str>,
    args: &BaseArgs,
    environment: &Environment,
) -> Result<HubOptions> {
    match environment.hub(revision, args.offline == Some(true)) {
        Err(_) if name.is_dir() => Ok(HubOptions::default()),
        options => options,
    }
}

/// Makes the thread pool of the kernels: `threads` threads, or one for each core.
///
/// # Errors
/// When the system refuses the threads.
pub fn threads(threads: Option<usize>) -> Result<()> {
    rayon::ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0)).build_global().map_err(|cause| {
        let asked = threads.map_or(String::new(), |threads| format!(" {threads}"));
        Error::failed(format!(
            "--threads{asked}: cannot be started: {cause}; give fewer, or raise the limits of threads and memory \
             (`ulimit -u`, `ulimit -v`)"
        ))
    })
}
