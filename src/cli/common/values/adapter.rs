//! Values that describe an adapter, or name one.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// The value of `--prefix-init`: initial keys and values of a new prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixInit {
    /// Keys and values that the base computes on a text.
    Text,
    /// Normally distributed random numbers.
    Random,
    /// Zeros for all keys and values.
    Zero,
}

/// The value of `--prompt-init`: initial virtual tokens of a new prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PromptInit {
    /// Embeddings of a text's tokens.
    Text,
    /// Embeddings of random tokens.
    Vocab,
    /// Normally distributed random numbers.
    Random,
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

/// More layers than any base has, so that a mistyped range does not fill the memory.
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
    /// Regular expression for the end of a module path.
    pub key: String,
    /// The rank or alpha of the matched sites.
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

/// `--adapter DIR[=SCALE]` of `engraft-infer`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScaledAdapter {
    /// Folder of the adapter, or its id on the hub.
    pub name: PathBuf,
    /// Factor for the LoRA's delta, 1 if none is given.
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
