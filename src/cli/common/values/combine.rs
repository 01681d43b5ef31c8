//! Values of `combine`.

use std::str::FromStr;

use engraft_adapters::{CombineMethod, MajoritySign};
use serde::{Serialize, Serializer};

/// The value of `combine --method`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CombineName(pub CombineMethod);

impl CombineName {
    /// PEFT's default, `svd`.
    pub const USUAL: Self = Self(CombineMethod::ALL[2]);
}

impl FromStr for CombineName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        CombineMethod::named(text).map(Self).ok_or_else(|| {
            let names: Vec<&str> = CombineMethod::ALL.iter().map(|method| method.name).collect();
            format!("give one of {}", names.join(", "))
        })
    }
}

impl Serialize for CombineName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name)
    }
}

/// The value of `--majority-sign-method`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MajorityName {
    /// The sign of the sum.
    Total,
    /// The sign that more adapters have.
    Frequency,
}

impl MajorityName {
    /// How signs are elected.
    pub fn sign(self) -> MajoritySign {
        match self {
            Self::Total => MajoritySign::Total,
            Self::Frequency => MajoritySign::Frequency,
        }
    }
}
