//! What a user asks for: kind, rank, targets, prefix length. The only home of these defaults.

use std::{collections::BTreeMap, convert::Infallible, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The adapters of one run: a LoRA, a prefix, or both.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdapterSpec {
    /// Low-rank deltas on linear modules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraSpec>,
    /// Learned keys and values in front of every sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<PrefixSpec>,
}

/// A LoRA: `y = x W + b + s (dropout(x) A^T) B^T` (Hu et al. 2021, arXiv:2106.09685).
///
/// The scale s is alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023,
/// arXiv:2312.03732).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSpec {
    /// Rank r of the delta; of each part's delta where parts are targets.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Modules or parts the LoRA attaches to.
    pub targets: Targets,
    /// Layers it attaches to; `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Probability in [0, 1) that an input element of the LoRA branch is dropped.
    pub dropout: f64,
    /// Whether the scale is alpha / sqrt(rank).
    pub rslora: bool,
    /// Ranks that differ: regex on the end of the module path -> rank; the first match in key order wins.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas that differ, keyed like `rank_pattern`.
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// A prefix: `length` learned keys and values per layer (Li and Liang 2021, arXiv:2101.00190).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefixSpec {
    /// Virtual tokens, P.
    pub length: usize,
    /// Hidden width of the two-layer network that makes the prefix; `None` learns it directly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub projection: Option<usize>,
}

/// Which modules a LoRA attaches to. As text: `q,v`, `all-linear`, `/regex/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// Every linear module of every layer.
    AllLinear,
    /// Module paths or their ends after a dot (`c_attn`, `mlp.c_proj`), or parts (`q`, `c_attn.v`).
    List(Vec<String>),
    /// A regular expression that must match a whole module path.
    Regex(String),
}

impl Default for LoraSpec {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            targets: Targets::List(vec!["c_attn".to_owned()]),
            layers: None,
            dropout: 0.0,
            rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

impl Default for PrefixSpec {
    fn default() -> Self {
        Self { length: 20, projection: None }
    }
}

impl LoraSpec {
    /// The scale of a delta with this rank and alpha.
    pub fn scale(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

impl Targets {
    fn from_names(names: Vec<String>) -> Self {
        if names == ["all-linear"] { Self::AllLinear } else { Self::List(names) }
    }
}

impl FromStr for Targets {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let text = text.trim();
        if let Some(regex) = text.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')) {
            return Ok(Self::Regex(regex.to_owned()));
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self::from_names(names.map(str::to_owned).collect()))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => write!(f, "all-linear"),
            Self::List(names) => write!(f, "{}", names.join(",")),
            Self::Regex(regex) => write!(f, "/{regex}/"),
        }
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::List(names) => names.serialize(serializer),
            _ => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Names(Vec<String>),
        }
        Ok(match Written::deserialize(deserializer)? {
            Written::Text(text) => text.parse().unwrap_or_else(|never: Infallible| match never {}),
            Written::Names(names) => Self::from_names(names),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_and_written_as_text() {
        for (text, targets) in [
            ("all-linear", Targets::AllLinear),
            ("/.*c_attn/", Targets::Regex(".*c_attn".into())),
            ("q,v", Targets::List(vec!["q".into(), "v".into()])),
        ] {
            assert_eq!(text.parse::<Targets>().unwrap(), targets);
            assert_eq!(targets.to_string(), text);
            let json = serde_json::to_string(&targets).unwrap();
            assert_eq!(serde_json::from_str::<Targets>(&json).unwrap(), targets);
        }
        assert_eq!(" q , v,".parse::<Targets>().unwrap(), Targets::List(vec!["q".into(), "v".into()]));
    }

    #[test]
    fn missing_fields_take_the_defaults_and_unknown_ones_are_refused() {
        let lora: LoraSpec = serde_json::from_str(r#"{"rank": 4}"#).unwrap();
        assert_eq!(lora, LoraSpec { rank: 4, ..LoraSpec::default() });
        assert!(serde_json::from_str::<LoraSpec>(r#"{"rnak": 4}"#).is_err());
        let spec = AdapterSpec { lora: Some(lora), prefix: Some(PrefixSpec::default()) };
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<AdapterSpec>(&json).unwrap(), spec);
    }

    #[test]
    fn rslora_divides_by_the_root() {
        let plain = LoraSpec::default();
        assert_eq!(plain.scale(8, 16.0), 2.0);
        assert_eq!(LoraSpec { rslora: true, ..plain }.scale(4, 16.0), 8.0);
    }
}
