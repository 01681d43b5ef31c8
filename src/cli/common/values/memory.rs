//! Values that fix a choice of the memory plan, or leave it open.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{model::Recompute, plan::budget::Limit};

/// `auto`, `on` or `off`, where `auto` leaves the choice to the memory plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// The plan chooses.
    Auto,
    /// Always, `on`.
    On,
    /// Never, `off`.
    Off,
}

impl Switch {
    /// The fixed choice; `None` for `auto`.
    pub fn fixed(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

/// A number of rows, or `auto`, which leaves it to the memory plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RowsName {
    /// This number of rows.
    Rows(usize),
    /// The plan chooses.
    Auto(AutoName),
}

/// The word `auto`, as serde reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AutoName {
    /// The only value.
    Auto,
}

impl RowsName {
    /// The value `auto`.
    pub const AUTO: Self = Self::Auto(AutoName::Auto);

    /// The fixed number of rows; `None` for `auto`.
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

/// Units of sizes in bytes; a name comes before the names that it ends with.
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

/// The bytes of a size such as `4GiB`; `None` for what is none.
pub fn bytes_of(text: &str) -> Option<u64> {
    let units = UNITS.into_iter();
    let (number, unit) =
        units.filter_map(|(name, unit)| Some((text.strip_suffix(name)?, unit))).next().unwrap_or((text, 1));
    let bytes = number.trim().parse::<f64>().ok()? * unit as f64;
    (1.0..1e18).contains(&bytes).then_some(bytes as u64)
}

impl FromStr for MemoryName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self(Limit::Auto));
        }
        let bytes = bytes_of(text).ok_or("give auto, or a size such as 4GiB or 1500MiB")?;
        Ok(Self(Limit::Bytes(bytes)))
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
