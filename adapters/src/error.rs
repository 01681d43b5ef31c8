//! Errors of adapters and of their files.

use std::{
    io,
    path::{Path, PathBuf},
};

use engraft_util::{atomic::WriteError, stand_in::StandIn, words::count_of};

use crate::{
    Problem, methods,
    problem::{first_names, problem_list, remedy},
};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

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
    #[error("{option}: `{target}` matches no layer norm; choose among {}", .norms.join(", "))]
    NoNormMatched {
        /// The property with the name or expression: `norms` or `saved_norms`.
        option: &'static str,
        /// The name or expression as the user wrote it.
        target: String,
        /// Names of the base's layer norms.
        norms: Vec<String>,
    },
    /// Trained norms whose biases are trained already.
    #[error(
        "saved_norms: the biases of norms are trained by bias all already; give bias lora_only, or leave saved_norms out"
    )]
    NormsTwice,
    /// A regular expression of a target or a pattern that cannot be compiled.
    #[error("{option}: `{pattern}` is no regular expression that can be used here ({cause}); correct it")]
    BadRegex {
        /// Option with the expression: `targets`, `norms`, `feedforward`, `saved_norms`, or a pattern such as
        /// `rank_pattern`.
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
    /// A part of a module, for a method that attaches to whole ones.
    #[error(
        "targets: `{part}` is a part of {module}, and {method} attaches to whole modules; choose {module}"
    )]
    PartOfModule {
        /// Name of the part, such as `q`.
        part: String,
        /// Name of the module, such as `attn.c_attn`.
        module: String,
        /// Name of the method.
        method: &'static str,
    },
    /// The embedding of tokens, for a method that attaches to linear modules alone.
    #[error(
        "targets: {module} is the embedding of tokens, to which {method} does not attach; leave it out or take lora"
    )]
    EmbeddingTarget {
        /// Full path of the embedding.
        module: String,
        /// Name of the method.
        method: &'static str,
    },
    /// A frozen A on the embedding of tokens.
    #[error(
        "freeze_a: A of {module} starts at 0, and frozen it would stay there; leave the embedding out of the targets"
    )]
    FrozenEmbedding {
        /// Full path of the embedding.
        module: String,
    },
    /// Initial values that a LoRA cannot have.
    #[error("init_lora_weights: {init} {why}")]
    InitialFactors {
        /// Name of the initial values.
        init: &'static str,
        /// The reason and the remedy, as the end of a sentence.
        why: String,
    },
    /// Feed-forward modules of IA3 that are no targets of it.
    #[error(
        "feedforward: `{target}` matches no module among the targets {targets}; add it there or choose others"
    )]
    FeedforwardUnmatched {
        /// The name or expression as the user wrote it.
        target: String,
        /// The targets as the user wrote them.
        targets: String,
    },
    /// A module whose input one method scales, and to which another adds a delta of the input as it was.
    #[error(
        "targets: {scales} scales the input of `{module}` and {adds} adds a delta to it, which PEFT computes in \
         another way in each order; leave the module to one of them, or let {scales} scale its output"
    )]
    ScaledInputAndDelta {
        /// Full path of the module, such as `transformer.h.3.mlp.c_proj`.
        module: String,
        /// Name of the method that scales.
        scales: &'static str,
        /// Name of the method that adds.
        adds: &'static str,
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
        /// The alpha that was given.
        value: f64,
    },
    /// A factor of a learning rate that is not above 0.
    #[error("lora_plus_ratio: {value} is no finite number above 0; give one such as 16")]
    LoraPlusRatio {
        /// The factor that was given.
        value: f64,
    },
    /// A dropout outside [0, 1).
    #[error("dropout: {value} is not in [0, 1); give a probability such as 0.05")]
    Dropout {
        /// The probability that was given.
        value: f64,
    },
    /// A dropout for a method that is trained without.
    #[error(
        "dropout: {value} is not supported with {method}, where PEFT would drop inputs of the frozen product too; leave it out"
    )]
    DroppedInputs {
        /// The probability that was given.
        value: f64,
        /// Name of the method.
        method: &'static str,
    },
    /// Methods with low-rank deltas that drop their input with different probabilities.
    #[error("dropout: one method drops {first} of its input and another one {second}; give them the same")]
    DropoutsDiffer {
        /// Probability of the first method.
        first: f64,
        /// Probability of a later method.
        second: f64,
    },
    /// An initial value of VeRA that FP32 cannot hold.
    #[error("d_initial: {value} is not finite in FP32; give a number such as 0.1")]
    DInitial {
        /// The initial value that was given.
        value: f64,
    },
    /// A value with which ranks cannot be allocated.
    #[error("{option}: {value} {why}")]
    Allocation {
        /// The option.
        option: &'static str,
        /// The value that was given.
        value: String,
        /// What is wrong with it, and the remedy.
        why: &'static str,
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
    /// A prompt that is empty or leaves no position for text.
    #[error("prompt length: {length} is not between 1 and {}; the base has {positions} positions", .positions.saturating_sub(1))]
    PromptLength {
        /// Virtual tokens asked for.
        length: usize,
        /// Longest sequence of the base in tokens.
        positions: usize,
    },
    /// A prefix beside a prompt.
    #[error(
        "methods: a prefix and a prompt cannot be in one adapter, because PEFT has no model with both; leave one of \
         them out"
    )]
    PrefixAndPrompt,
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
    /// Two methods of one type in PEFT.
    #[error(
        "method: {first} and {second} are both {peft_type} in PEFT, which names their tensors alike; choose one of them"
    )]
    SameType {
        /// Name of the first method.
        first: &'static str,
        /// Name of the second method.
        second: &'static str,
        /// Value of `peft_type` in the config of either.
        peft_type: &'static str,
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
        /// The part, in words for the sentence: `prefix`.
        what: &'static str,
    },
    /// An adapter that has more than low-rank deltas of modules.
    #[error("an adapter with {what} is no plain LoRA")]
    NotPlain {
        /// What it has.
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
    /// A pickle of tensors that cannot be read.
    #[error("{}: cannot be read as a PyTorch (1.6 or later) state dict: {cause}; load it in PEFT and save it again", .path.display())]
    Pickle {
        /// Path of the file.
        path: PathBuf,
        /// Why, in the words of its reader.
        cause: String,
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
    /// Parts of an adapter that no load of a model has asked for.
    #[error(
        "{}: the model did not load {} of the adapter: {}; load them too, or name them as the model does (rename_f)",
        .path.display(), count_of(.parameters.len(), "parameter"), first_names(.parameters)
    )]
    NotLoaded {
        /// Folder of the adapter.
        path: PathBuf,
        /// Parameters that the adapter changes, by their names in the adapter.
        parameters: Vec<String>,
    },
    /// Two names of a model for one parameter of an adapter.
    #[error("{parameter}: both {first} and {second} may be meant; say with rename_f which one is")]
    Ambiguous {
        /// The adapter's parameter.
        parameter: String,
        /// The first name in the model.
        first: String,
        /// The second name in the model.
        second: String,
    },
    /// Layers that cannot be one adapter.
    #[error("the layers cannot be saved as one adapter: {cause}")]
    Layers {
        /// Why, and what to do.
        cause: String,
    },
    /// A value that is NaN or infinite and must not reach a file.
    #[error("{tensor}: value {index} is {value}; the adapter was not written, lower the learning rate")]
    NotFinite {
        /// Name of the tensor.
        tensor: String,
        /// Flat index in the tensor.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A file or folder that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The reference maths failed inside candle.
    #[error("reference maths: {0}")]
    Candle(#[from] candle_core::Error),
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
