//! Values about data files.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::data::Kind;

/// `--data-format`: the extension that files of the format have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FormatName(pub Kind);

impl FromStr for FormatName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let name = text.trim_start_matches('.').to_lowercase();
        Kind::named(&name)
            .map(Self)
            .ok_or_else(|| format!("give one of {}", Kind::names().collect::<Vec<_>>().join(", ")))
    }
}

impl TryFrom<String> for FormatName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<FormatName> for String {
    fn from(name: FormatName) -> Self {
        name.0.name().to_owned()
    }
}
