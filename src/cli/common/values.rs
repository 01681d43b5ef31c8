//! Option values with a spelling of their own, the same on the command line and in a config file.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use crate::{
    device::{Best, DType, Device, DeviceKind},
    model::{BaseDType, Recompute},
    plan::budget::Limit,
};

/// `--method`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum Method {
    /// Low-rank deltas added to the frozen matrices.
    #[value(name = "lora")]
    #[serde(rename = "lora")]
    Lora,
    /// Trained keys and values before every text.
    #[value(name = "prefix")]
    #[serde(rename = "prefix")]
    Prefix,
    /// Both at once.
    #[value(name = "lora+prefix")]
    #[serde(rename = "lora+prefix")]
    LoraPrefix,
}

impl Method {
    /// Whether the method has a LoRA.
    pub fn lora(self) -> bool {
        self != Self::Prefix
    }

    /// Whether the method has a prefix.
    pub fn prefix(self) -> bool {
        self != Self::Lora
    }

    /// The name as part of a folder's name.
    pub fn in_file_name(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Prefix => "prefix",
            Self::LoraPrefix => "lora-prefix",
        }
    }
}

/// `--prefix-init`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixInit {
    /// Keys and values the base computes when it reads real text.
    Text,
    /// Random numbers.
    Random,
    /// Zeros.
    Zero,
}

/// `--schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleName {
    /// The same rate after warm-up.
    Constant,
    /// Down to zero on a line.
    Linear,
    /// Down to zero on half a cosine.
    Cosine,
}

/// A switch that can be left to the memory plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// As the plan needs it.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Switch {
    /// What is fixed.
    pub fn fixed(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

/// A number of rows that can be left to the memory plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RowsName {
    /// That many.
    Rows(usize),
    /// As the plan needs it.
    Auto(AutoName),
}

/// The word `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AutoName {
    /// `auto`
    Auto,
}

impl RowsName {
    /// Left to the plan.
    pub const AUTO: Self = Self::Auto(AutoName::Auto);

    /// What is fixed.
    pub fn fixed(self) -> Option<usize> {
        match self {
            Self::Rows(rows) => Some(rows),
            Self::Auto(_) => None,
        }
    }
}

impl FromStr for RowsName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::AUTO),
            _ => text.parse().map(Self::Rows).map_err(|_| "give a number of rows, or auto".to_owned()),
        }
    }
}

/// `--memory`: `auto`, or a size such as `4GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MemoryName(pub Limit);

/// Units of sizes, the longer names first.
const UNITS: [(&str, u64); 10] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
];

impl FromStr for MemoryName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self(Limit::Auto));
        }
        let (number, unit) = UNITS
            .into_iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))
            .unwrap_or((text, 1));
        let bytes = number.trim().parse::<f64>().map(|number| number * unit as f64);
        match bytes {
            Ok(bytes) if (1.0..1e18).contains(&bytes) => Ok(Self(Limit::Bytes(bytes as u64))),
            _ => Err("give auto, or a size such as 4GiB or 1500MiB".to_owned()),
        }
    }
}

impl TryFrom<String> for MemoryName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<MemoryName> for String {
    fn from(name: MemoryName) -> Self {
        let Limit::Bytes(bytes) = name.0 else { return "auto".to_owned() };
        let whole = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        let unit = whole.into_iter().find(|(_, unit)| bytes.is_multiple_of(*unit));
        unit.map_or(bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
    }
}

/// `--optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW with FP32 moments, with 8-bit ones where nothing else fits.
    Auto,
    /// AdamW with FP32 moments.
    Adamw,
    /// AdamW with 8-bit moments.
    #[value(name = "adamw8bit")]
    Adamw8bit,
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceName {
    /// The best device there is.
    Auto,
    /// The host's cores.
    Cpu,
    /// The CUDA device with this number.
    Cuda(usize),
}

impl DeviceName {
    /// Opens the device.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn open(self) -> crate::error::Result<Device> {
        match self {
            Self::Cpu => Ok(Device::HOST),
            Self::Cuda(number) => Device::cuda(number),
            Self::Auto => Ok(super::open::best_device()),
        }
    }

    /// Its kind, which need not be on this machine.
    pub fn kind(self) -> &'static DeviceKind {
        match self {
            Self::Cpu => DeviceKind::CPU,
            Self::Cuda(_) => DeviceKind::CUDA,
            Self::Auto => Best::find().device.kind(),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.strip_prefix("cuda:")?.parse().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => number(text).map(Self::Cuda).ok_or_else(|| "give auto, cpu, cuda or cuda:N".to_owned()),
        }
    }
}

impl TryFrom<String> for DeviceName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        match name {
            DeviceName::Auto => "auto".to_owned(),
            DeviceName::Cpu => "cpu".to_owned(),
            DeviceName::Cuda(0) => "cuda".to_owned(),
            DeviceName::Cuda(number) => format!("cuda:{number}"),
        }
    }
}

/// `--precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit arithmetic over the FP16 base.
    F32,
    /// FP16 activations with a loss scale, on CUDA devices.
    F16,
    /// BF16 activations on CUDA devices; on a CPU BF16 products where it has fast ones, F32 elsewhere.
    Bf16,
}

impl Precision {
    /// The type of activations.
    pub fn activations(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// `--base-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BaseDtype {
    /// The base as it is.
    F16,
    /// Matrices in 8 bits with a scale for each 32 weights of a row, on CPUs.
    Q8,
}

impl BaseDtype {
    /// What the matrices of the base are kept in.
    pub fn kept(self) -> BaseDType {
        match self {
            Self::F16 => BaseDType::F16,
            Self::Q8 => BaseDType::Q8,
        }
    }
}

/// `--split` of `eval`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitName {
    /// `train.*` of a folder.
    Train,
    /// `valid.*` of a folder.
    Valid,
    /// `test.*` of a folder.
    Test,
}

/// `--warmup`: a count of steps, or with a dot a fraction of all steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Warmup {
    /// That many steps.
    Steps(u64),
    /// That part of all steps.
    Fraction(f64),
}

impl FromStr for Warmup {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let number = if text.contains('.') {
            text.parse().ok().map(Self::Fraction)
        } else {
            text.parse().ok().map(Self::Steps)
        };
        number.ok_or_else(|| "give a number of steps such as 100, or a fraction such as 0.1".to_owned())
    }
}

/// `--layers`: indices and ranges between commas, `0,2,5-11`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "LayersWritten", into = "Vec<usize>")]
pub struct LayerList(pub Vec<usize>);

#[derive(Deserialize)]
#[serde(untagged)]
enum LayersWritten {
    Text(String),
    Indices(Vec<usize>),
}

impl TryFrom<LayersWritten> for LayerList {
    type Error = String;
    fn try_from(value: LayersWritten) -> Result<Self, String> {
        match value {
            LayersWritten::Text(text) => text.parse(),
            LayersWritten::Indices(indices) => Ok(Self(indices)),
        }
    }
}

impl From<LayerList> for Vec<usize> {
    fn from(layers: LayerList) -> Self {
        layers.0
    }
}

/// More layers than any base has; keeps a mistyped range from filling the memory.
const MOST_LAYERS: usize = 10_000;

impl FromStr for LayerList {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut layers = Vec::new();
        for piece in text.split(',').map(str::trim) {
            let (first, last) = piece.split_once('-').unwrap_or((piece, piece));
            match (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
                (Ok(first), Ok(last)) if first <= last && last < MOST_LAYERS => layers.extend(first..=last),
                _ => return Err(format!("{piece:?} is no layer; give indices or ranges such as 0,2,5-11")),
            }
        }
        Ok(Self(layers))
    }
}

/// `--rank-pattern` and `--alpha-pattern`: `KEY=NUMBER`, where KEY is a regular expression for sites.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    /// The expression.
    pub key: String,
    /// The number as written, a rank or an alpha.
    pub number: f64,
}

impl FromStr for Pattern {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let pieces = text.rsplit_once('=').and_then(|(key, number)| Some((key, number.trim().parse().ok()?)));
        match pieces {
            Some((key, number)) if !key.is_empty() => Ok(Self { key: key.to_owned(), number }),
            _ => Err("give KEY=NUMBER, such as h.0.attn.c_attn=4".to_owned()),
        }
    }
}

impl TryFrom<String> for Pattern {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        format!("{}={}", pattern.key, pattern.number)
    }
}

/// `--recompute`: `auto`, `none`, `mlp`, `linear`, `every:K` or `all`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RecomputeName(pub Option<Recompute>);

impl FromStr for RecomputeName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let every = || text.strip_prefix("every:")?.parse().ok().filter(|&every: &usize| every > 0);
        match text {
            "auto" => Ok(Self(None)),
            "none" => Ok(Self(Some(Recompute::None))),
            "mlp" => Ok(Self(Some(Recompute::Mlp))),
            "linear" => Ok(Self(Some(Recompute::Linear))),
            "all" => Ok(Self(Some(Recompute::All))),
            _ => every()
                .map(|every| Self(Some(Recompute::Every(every))))
                .ok_or_else(|| "give auto, none, mlp, linear, every:K with K at least 1, or all".to_owned()),
        }
    }
}

impl TryFrom<String> for RecomputeName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<RecomputeName> for String {
    fn from(name: RecomputeName) -> Self {
        name.0.map_or_else(|| "auto".to_owned(), |recompute| recompute.to_string())
    }
}

/// `--adapter DIR[=SCALE]` of `engraft-infer`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScaledAdapter {
    /// A folder or a hub id.
    pub name: PathBuf,
    /// Factor on the LoRA's delta.
    pub scale: f64,
}

impl FromStr for ScaledAdapter {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        // A folder may have a name that ends like a scale.
        let scaled = text.rsplit_once('=').filter(|_| !Path::new(text).is_dir());
        let scaled = scaled.and_then(|(name, scale)| Some((name, scale.parse::<f64>().ok()?)));
        let (name, scale) = scaled.unwrap_or((text, 1.0));
        if name.is_empty() || !scale.is_finite() {
            return Err("give DIR or DIR=SCALE with a finite scale".to_owned());
        }
        Ok(Self { name: name.into(), scale })
    }
}

/// `--input-ids 1,2,3`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenIds(pub Vec<u32>);

impl FromStr for TokenIds {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed: Result<Vec<u32>, _> = text.split(',').map(|piece| piece.trim().parse()).collect();
        parsed.map(Self).map_err(|_| "give token ids between commas, such as 15496,995".to_owned())
    }
}
