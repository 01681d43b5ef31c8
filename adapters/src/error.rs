//! Errors of adapters and of their files.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use engraft_util::{
    atomic::WriteError,
    stand_in::StandIn,
    words::{count_of, short_hash},
};

use crate::methods;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How many tensors a message names; the variant holds all of them.
const NAMED_TENSORS: usize = 3;

/// Why an adapter cannot be made, read or written. The message is a sentence for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No method was asked for.
    #[error("no adapter is asked for; choose one or more of {}", methods::list(|kind| kind.name.to_owned(), ", "))]
    Empty,
    /// A target that matches no module in the chosen layers.
    #[error("targets: `{target}` matches no module; choose among {}", .sites.join(", "))]
    NothingMatched {
        /// The target as the user wrote it.
        target: String,
        /// Names of the base's sites and parts.
        sites: Vec<String>,
    },
    /// A name or an expression that matches no layer norm.
    #[error("norms: `{target}` matches no layer norm; choose among {}", .norms.join(", "))]
    NoNormMatched {
        /// The name or expression as the user wrote it.
        target: String,
        /// Names of the base's layer norms.
        norms: Vec<String>,
    },
    /// A regular expression of a target or a pattern that cannot be compiled.
    #[error("{option}: `{pattern}` is no regular expression that can be used here ({cause}); correct it")]
    BadRegex {
        /// Option with the expression: `targets`, `norms`, `rank_pattern` or `alpha_pattern`.
        option: &'static str,
        /// The regular expression as the user wrote it.
        pattern: String,
        /// The reason, from the regular-expression parser.
        cause: String,
    },
    /// A site and a part of the same site, in one layer.
    #[error("targets: `{module}` is chosen as a whole and as its part `{part}`; choose one of the two")]
    PartAndWhole {
        /// Full path of the module, such as `transformer.h.3.attn.c_attn`.
        module: String,
        /// Name of the part, such as `q`.
        part: String,
    },
    /// Parts of one module with different rank or alpha.
    #[error(
        "rank_pattern, alpha_pattern: the parts of `{module}` get different ranks or alphas; give them the same"
    )]
    PartsDiffer {
        /// Full path of the module, such as `transformer.h.3.attn.c_attn`.
        module: String,
    },
    /// A rank of zero.
    #[error("{option}: the rank is 0; it must be at least 1")]
    ZeroRank {
        /// `rank`, or the pattern key that gives it.
        option: String,
    },
    /// An alpha that is NaN or infinite.
    #[error("{option}: {value} is not finite; give a number such as 16")]
    Alpha {
        /// `alpha`, or the pattern key that gives it.
        option: String,
        /// The value.
        value: f64,
    },
    /// A dropout outside [0, 1).
    #[error("dropout: {value} is not in [0, 1); give a probability such as 0.05")]
    Dropout {
        /// The value.
        value: f64,
    },
    /// A choice of layers that chooses none.
    #[error("layers: the list is empty; name layers or leave it out for all of them")]
    NoLayers,
    /// A layer that the base does not have.
    #[error("layers: {layer} does not exist; the base has layers 0-{}", .layers.saturating_sub(1))]
    LayerOutOfRange {
        /// Index of the layer, from 0.
        layer: usize,
        /// Number of layers of the base.
        layers: usize,
    },
    /// A pattern key that applies to no adapted module.
    #[error(
        "{option}: `{key}` applies to no adapted module (none matches, or a key that sorts before it wins); \
         they are called like `{example}`"
    )]
    PatternUnmatched {
        /// Option with the key: `rank_pattern` or `alpha_pattern`.
        option: &'static str,
        /// The key as the user wrote it.
        key: String,
        /// A module that is adapted.
        example: String,
    },
    /// A prefix that is empty or leaves no position for text.
    #[error("prefix length: {length} is not between 1 and {}; the base has {positions} positions", .positions.saturating_sub(1))]
    PrefixLength {
        /// Virtual tokens asked for.
        length: usize,
        /// Longest sequence of the base in tokens.
        positions: usize,
    },
    /// A projection without hidden units.
    #[error("prefix projection: the hidden width is 0; it must be at least 1")]
    ZeroProjection,
    /// More values than this crate handles.
    #[error("{tensor}: a tensor of shape {shape:?} is too large; lower the rank or the hidden width")]
    TooLarge {
        /// Name of the tensor.
        tensor: String,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// A tensor that modules share and that they give different shapes.
    #[error("{tensor}: modules that share it need different shapes, one of them {shape:?}; choose others")]
    SharedShape {
        /// Name of the tensor.
        tensor: String,
        /// The second shape asked for.
        shape: Vec<usize>,
    },
    /// Two methods that set the same part of the model.
    #[error("two methods set {what}; leave one of them out")]
    Conflict {
        /// The part of the model that both methods set.
        what: &'static str,
    },
    /// A part of an adapter that no weight of a base can hold.
    #[error(
        "a {what} is no weight of the base, so that it cannot be folded into one; use the adapter beside its base"
    )]
    NotFoldable {
        /// The part.
        what: &'static str,
    },
    /// Adapters that cannot be combined into one.
    #[error("{why}")]
    NotCombinable {
        /// The reason and the remedy, a sentence.
        why: String,
    },
    /// Initial values that are computed from base weights, which are not available.
    #[error("{method}: the initial values are computed from the base's weights, which are not available")]
    WeightsNeeded {
        /// Name of the method.
        method: &'static str,
    },
    /// A file or folder that cannot be read.
    #[error("{}: cannot be read: {cause}; check the path and its permissions", .path.display())]
    Read {
        /// The file or folder that cannot be read.
        path: PathBuf,
        /// Why, in the system's words.
        cause: io::Error,
    },
    /// A folder without adapter files.
    #[error("{}: is no adapter: {found}; name a folder that holds adapter_config.json, or {}", .path.display(), methods::list(|kind| format!("{}/", kind.name), " and "))]
    NotAnAdapter {
        /// Folder of the adapter.
        path: PathBuf,
        /// Content of the folder, as the end of a sentence.
        found: String,
    },
    /// A file that a download left in place of the one that was meant.
    #[error("{}: {found}", .path.display())]
    StandIn {
        /// Path of the file.
        path: PathBuf,
        /// What it is instead.
        found: StandIn,
    },
    /// A config that is no JSON object.
    #[error("{}: is no valid adapter config: {cause}; save the adapter again", .path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// Line, column and reason.
        cause: String,
    },
    /// A tensor file that breaks a rule of the safetensors format.
    #[error("{}: is no valid safetensors file: {rule}; save or download it again", .path.display())]
    SafeTensors {
        /// Path of the file.
        path: PathBuf,
        /// The rule of the format that is broken.
        rule: String,
    },
    /// An adapter that does not fit the base or uses what is not supported: every reason at once.
    #[error("{}: {}{}", .path.display(), problem_list(.problems), remedy(.problems))]
    Mismatch {
        /// Folder of the adapter.
        path: PathBuf,
        /// Every reason, in the order in which they were found.
        problems: Vec<Problem>,
    },
    /// Values that do not fill the layout.
    #[error("{what}: {found} values where the adapter has {expected}; this is a fault of the program")]
    ValueCount {
        /// The values that were given.
        what: &'static str,
        /// Number of values given.
        found: usize,
        /// Number of values expected.
        expected: usize,
    },
    /// A value that is NaN or infinite and must not reach a file.
    #[error("{tensor}: value {index} is {value}; the adapter was not written, lower the learning rate")]
    NotFinite {
        /// Name of the tensor.
        tensor: String,
        /// Flat index in the tensor.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A file or folder that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The reference maths failed inside candle.
    #[error("reference maths: {0}")]
    Candle(#[from] candle_core::Error),
}

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

impl Error {
    /// Whether the user's input is wrong (exit code 2), as opposed to a failure while running (exit code 1).
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            Self::Write(_)
                | Self::NotFinite { .. }
                | Self::ValueCount { .. }
                | Self::SharedShape { .. }
                | Self::WeightsNeeded { .. }
                | Self::Candle(_)
        )
    }

    /// The reasons of an [`Error::Mismatch`]; empty for other errors.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Mismatch { problems, .. } => problems,
            _ => &[],
        }
    }

    /// The error for a file that is something else; `None` if it may be what its name says.
    pub(crate) fn stand_in(path: &Path) -> Option<Self> {
        StandIn::at(path).map(|found| Self::StandIn { path: path.to_owned(), found })
    }

    pub(crate) fn read(path: &Path, cause: io::Error) -> Self {
        Self::Read { path: path.to_owned(), cause }
    }
}

/// The end of the sentence about an adapter that does not fit: what to do, where that is not the same for each reason.
fn remedy(problems: &[Problem]) -> &'static str {
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

/// Every reason, and of those that name a tensor the first three, last.
fn problem_list(problems: &[Problem]) -> String {
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
                let known = methods::list(|kind| kind.peft_type.to_owned(), " and ");
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
