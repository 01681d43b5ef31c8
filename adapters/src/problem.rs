//! Why files of an adapter do not fit, and how a message lists the reasons.

use std::fmt;

use engraft_util::words::{count_of, short_hash};

use crate::methods;

/// How many tensors a message names; the error holds all of them.
const NAMED_TENSORS: usize = 3;

/// One reason why an adapter's files do not fit.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Problem {
    /// An adapter kind this crate does not know.
    UnsupportedType(String),
    /// The base has no such modules, layers or positions.
    Spec(String),
    /// A config field with a value that is not supported or not understood.
    Field {
        /// Name in adapter_config.json.
        name: String,
        /// Its value as JSON.
        value: String,
        /// The supported value, as the end of a sentence.
        expected: String,
    },
    /// A number of layers other than the base's.
    Layers {
        /// Layers the adapter is for.
        found: usize,
        /// Number of layers of the base.
        expected: usize,
    },
    /// A tensor the config promises and the file lacks.
    Missing(String),
    /// A tensor the config does not promise.
    Extra(String),
    /// A tensor of another shape.
    Shape {
        /// Name of the tensor.
        tensor: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape the config and the base ask for.
        expected: Vec<usize>,
    },
    /// A tensor of a type other than F32, F16, BF16.
    Dtype {
        /// Name of the tensor.
        tensor: String,
        /// Type in the file.
        found: String,
    },
    /// A value that is NaN or infinite.
    NotFinite {
        /// Name of the tensor.
        tensor: String,
        /// Index of the value in the flattened tensor.
        index: usize,
    },
    /// A value outside the blocks of a fused module's parts.
    OutsideBlock {
        /// Name of the tensor.
        tensor: String,
        /// Index of the value in the flattened tensor.
        index: usize,
    },
    /// A base with other weights than the adapter was made for.
    Base {
        /// Fingerprint in the adapter.
        found: String,
        /// Fingerprint of the base at hand.
        expected: String,
    },
}

/// The end of the sentence about an adapter that does not fit: what to do, where that is not the same for each reason.
pub(crate) fn remedy(problems: &[Problem]) -> &'static str {
    let any = |is: fn(&Problem) -> bool| problems.iter().any(is);
    if any(|it| {
        matches!(it, Problem::UnsupportedType(_))
            || matches!(it, Problem::Field { expected, .. } if expected.contains("supported"))
    }) {
        "; fold it into its base with PEFT's merge_and_unload() and use the result as the base"
    } else if any(|it| matches!(it, Problem::Layers { .. } | Problem::Shape { .. } | Problem::Spec(_))) {
        "; give the base that it was trained on"
    } else if any(|it| matches!(it, Problem::Missing(_) | Problem::Extra(_) | Problem::NotFinite { .. })) {
        "; save it again with PEFT's save_pretrained(), or download it again"
    } else {
        ""
    }
}

/// The first names of a list, and how many follow.
pub(crate) fn first_names(names: &[String]) -> String {
    let shown = names.iter().take(NAMED_TENSORS).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED_TENSORS) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Every reason, and of those that name a tensor the first three, last.
pub(crate) fn problem_list(problems: &[Problem]) -> String {
    let (tensors, others): (Vec<_>, Vec<_>) = problems.iter().partition(|problem| problem.names_a_tensor());
    let shown = others.into_iter().chain(tensors.iter().copied().take(NAMED_TENSORS));
    let mut text = format!("does not fit: {}", shown.map(Problem::to_string).collect::<Vec<_>>().join("; "));
    let more = tensors.len().saturating_sub(NAMED_TENSORS);
    if more > 0 {
        text += &format!("; and {more} more");
    }
    text
}

impl Problem {
    /// Whether a file may have the same problem in many tensors.
    fn names_a_tensor(&self) -> bool {
        match self {
            Self::Missing(_) | Self::Extra(_) | Self::Shape { .. } => true,
            Self::Dtype { .. } | Self::NotFinite { .. } | Self::OutsideBlock { .. } => true,
            Self::UnsupportedType(_) | Self::Spec(_) | Self::Field { .. } => false,
            Self::Layers { .. } | Self::Base { .. } => false,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnsupportedType(found) => {
                let known = methods::peft_types(" and ");
                write!(f, "peft_type {found} is not supported ({known} are)")
            }
            Self::Spec(error) => write!(f, "{error}"),
            Self::Field { name, value, expected } => write!(f, "{name} is {value} where {expected}"),
            Self::Layers { found, expected } => {
                write!(f, "it is for a base of {}, this one has {expected}", count_of(*found, "layer"))
            }
            Self::Missing(tensor) => write!(f, "tensor {tensor} is missing"),
            Self::Extra(tensor) => write!(f, "tensor {tensor} is not expected"),
            Self::Shape { tensor, found, expected } => {
                write!(f, "tensor {tensor} has shape {found:?} where {expected:?} is expected")
            }
            Self::Dtype { tensor, found } => {
                write!(f, "tensor {tensor} is {found} (F32, F16 and BF16 are read)")
            }
            Self::NotFinite { tensor, index } => write!(f, "tensor {tensor} is not finite at {index}"),
            Self::OutsideBlock { tensor, index } => {
                write!(f, "tensor {tensor} is not zero at {index}, outside the blocks of its parts")
            }
            Self::Base { found, expected } => write!(
                f,
                "it was made for a base with fingerprint {}, this base has {} (use that base)",
                short_hash(found),
                short_hash(expected)
            ),
        }
    }
}
