//! The registry of methods: one file for each, and one line below.
//!
//! A method's file holds its spec (what a user asks for, with the only home of the defaults), its tensors, its
//! initial values, its reference maths, and how PEFT writes it down. To add one: write the file, and add its line
//! to `methods!`. A method whose [`Contribution`] has a kind of part that no other has also needs a branch where
//! the model binds contributions.

pub mod adalora;
pub mod dora;
pub mod ia3;
pub mod ln_tuning;
pub mod lora;
pub mod prefix;
pub mod prompt_tuning;
#[cfg(test)]
#[path = "toy_tests.rs"]
mod toy;
pub mod vera;

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::{
    AdapterSet, BaseDescription, Contribution, Result,
    init::Init,
    layout::Slots,
    peft::{Fields, Files, Findings, TensorFile},
};
use adalora::AdaLoraSpec;
use dora::DoraSpec;
use ia3::Ia3Spec;
use ln_tuning::LnTuningSpec;
use lora::LoraSpec;
use prefix::PrefixSpec;
use prompt_tuning::PromptTuningSpec;
use vera::VeraSpec;

/// Makes [`AdapterSpec`] and [`kinds`] out of a line for each method. Tensors, folders and lines for the user
/// come in the order of the lines; methods after `in tests` exist in this crate's tests.
macro_rules! methods {
    ($($(#[$doc:meta])* $field:ident: $spec:ty,)+ ; in tests: $($(#[$more:meta])* $test:ident: $toy:ty,)*) => {
        /// The adapters of one run: one or more methods.
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct AdapterSpec {
            $($(#[$doc])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$spec>,)+
            $($(#[$more])* #[cfg(test)] #[serde(skip_serializing_if = "Option::is_none")] pub $test: Option<$toy>,)*
        }

        impl AdapterSpec {
            /// The methods asked for, in the order of the registry.
            pub(crate) fn methods(&self) -> Vec<&dyn Method> {
                let mut methods: Vec<&dyn Method> = Vec::new();
                $(methods.extend(self.$field.as_ref().map(|spec| spec as &dyn Method));)+
                $(#[cfg(test)] methods.extend(self.$test.as_ref().map(|spec| spec as &dyn Method));)*
                methods
            }

            /// Lines of a description of its methods, each a name and a text; a method begins with `kind`.
            pub fn lines(&self) -> Vec<(&'static str, String)> {
                self.methods().iter().flat_map(|method| method.lines()).collect()
            }

            /// These methods, and those of `other` that are not among them.
            pub(crate) fn or(self, other: Self) -> Self {
                Self {
                    $($field: self.$field.or(other.$field),)+
                    $(#[cfg(test)] $test: self.$test.or(other.$test),)*
                }
            }
        }

        $(impl From<$spec> for AdapterSpec {
            fn from(spec: $spec) -> Self {
                #[allow(clippy::needless_update, reason = "there may be a single method")]
                Self { $field: Some(spec), ..Self::default() }
            }
        })+

        /// Every kind of method, in the order of the registry.
        pub fn kinds() -> Vec<&'static Kind> {
            vec![$(&<$spec>::KIND,)+ $(#[cfg(test)] &<$toy>::KIND,)*]
        }
    };
}

methods! {
    /// Low-rank deltas on linear modules.
    lora: LoraSpec,
    // PEFT can fold those before prefix and prompt into a base, one after another, and wraps what they gave in one of
    // the two. What scales an output stands after what adds to it: it scales the sum.
    /// Low-rank deltas with frozen, shared factors.
    vera: VeraSpec,
    /// Low-rank deltas whose ranks are allocated in training.
    adalora: AdaLoraSpec,
    /// Vectors that scale modules.
    ia3: Ia3Spec,
    /// Layer norms of their own.
    ln_tuning: LnTuningSpec,
    /// Low-rank deltas on linear modules, and the norms of their columns.
    dora: DoraSpec,
    /// Learned keys and values in front of every sequence.
    prefix: PrefixSpec,
    /// Learned embeddings in front of every text.
    prompt_tuning: PromptTuningSpec,
    ; in tests:
    /// Has every kind of part.
    toy: toy::ToySpec,
}

/// A kind of method, by all its names.
#[derive(Debug)]
pub struct Kind {
    /// Name for users; also that of its folder where several methods are saved together.
    pub name: &'static str,
    /// Value of `peft_type` in PEFT's config.
    pub peft_type: &'static str,
    /// Whether a config with that `peft_type` is of this kind; where several are, the last one registered wins.
    pub(crate) claims: fn(&Fields) -> bool,
    /// Takes the method's own fields out of a config; nothing when one that it needs is missing or wrong.
    pub(crate) read: fn(&mut Fields) -> Option<Box<dyn Stored>>,
}

/// A method as it was asked for.
pub(crate) trait Method: Debug {
    /// Its names and its reader.
    fn kind(&self) -> &'static Kind;

    /// Checks what was asked for, adds the method's tensors to `slots`, and says what they do. The order of the
    /// tensors must follow from spec and base alone: saves depend on it.
    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution>;

    /// Writes the initial values of the method's tensors into `values`, the flat store, which holds zeros.
    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()>;

    /// Probability that an input element of its low-rank deltas is dropped; `None` where it has no such deltas.
    fn dropout(&self) -> Option<f64> {
        None
    }

    /// A line for each site or other part of the model that it changes.
    fn matched(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<String>;

    /// Lines of a description: a name of at most 12 letters, and a text.
    fn lines(&self) -> Vec<(&'static str, String)>;

    /// Its PEFT files. `derived` is what the model computes from the values and PEFT stores in their stead.
    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        derived: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>>;

    /// Reads its values into the flat store of `set`, which holds this method alone; what is wrong with them goes
    /// to `findings`. PEFT stores most methods as they are.
    fn read(
        &self,
        set: &AdapterSet,
        _: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        findings.read_plain(tensors, set, values)
    }
}

/// A method as a PEFT config has it, before a base was looked at.
pub(crate) trait Stored: Debug {
    /// The kind, with its names.
    fn kind(&self) -> &'static Kind;

    /// The method for a description, as far as the files tell.
    fn spec(&self, tensors: &TensorFile) -> AdapterSpec;

    /// A sentence for the user about what the files do not hold.
    fn hint(&self) -> Option<&'static str> {
        None
    }

    /// The method resolved against `base`, if it fits; every reason why it does not goes to `findings`.
    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet>;
}

/// Every kind that a config may have: those of the registry, and those that are read and not trained.
pub(crate) fn read_kinds() -> Vec<&'static Kind> {
    [kinds(), vec![&prompt_tuning::P_TUNING]].concat()
}

/// Every `peft_type` that is read, the last one after `last`.
pub(crate) fn peft_types(last: &str) -> String {
    listed(read_kinds().into_iter().map(|kind| kind.peft_type.to_owned()).collect(), last)
}

/// The text of every kind, the last one after `last`: with " or " `lora, ln_tuning or prefix`.
pub(crate) fn list(text: impl Fn(&Kind) -> String, last: &str) -> String {
    listed(kinds().into_iter().map(text).collect(), last)
}

fn listed(mut texts: Vec<String>, last: &str) -> String {
    match texts.pop() {
        Some(end) if !texts.is_empty() => format!("{}{last}{end}", texts.join(", ")),
        end => end.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_take_the_defaults_and_unknown_ones_are_refused() {
        let lora: LoraSpec = serde_json::from_str(r#"{"rank": 4}"#).unwrap();
        assert_eq!(lora, LoraSpec { rank: 4, ..LoraSpec::default() });
        assert!(serde_json::from_str::<LoraSpec>(r#"{"rnak": 4}"#).is_err());
        let prefix = Some(PrefixSpec::default());
        let spec = AdapterSpec { lora: Some(lora), prefix, ..AdapterSpec::default() };
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
