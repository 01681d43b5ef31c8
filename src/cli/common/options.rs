//! One definition for each option: name, help, default, check, config key and resume rule.
//!
//! [`options!`] turns the definitions of a group of options into a struct, which clap fills from the command
//! line and serde from a config file. The help text, the layers of config files, the identity of a run and
//! the tests of the manual read the definitions through [`Options::facts`].

use std::fmt::Display;

use engraft_adapters::Kinds;
use serde::Serialize;
use toml::Value;

use crate::error::{Error, Result};

/// An option with values of type `T` in the group `G`.
pub struct Definition<G, T> {
    value: &'static str,
    default: fn(&G) -> Option<T>,
    otherwise: &'static str,
    check: Check<T>,
    on_resume: OnResume,
    part: Part,
    from_adapter: bool,
    excludes: Option<&'static str>,
    basic: bool,
}

/// A switch: `--name` alone means true; `--name=false` overrides a config file.
pub const fn switch<G>() -> Definition<G, bool> {
    value("BOOL")
}

/// An option whose value the help calls `name`.
pub const fn value<G, T>(name: &'static str) -> Definition<G, T> {
    Definition {
        value: name,
        default: |_| None,
        otherwise: "",
        check: Check { refused: |_| None, fault: "", remedy: "" },
        on_resume: OnResume::Same,
        part: Part::Run,
        from_adapter: false,
        excludes: None,
        basic: false,
    }
}

impl<G, T> Definition<G, T> {
    /// The value if none is given; it may depend on other options of the group.
    pub const fn default(mut self, default: fn(&G) -> Option<T>) -> Self {
        self.default = default;
        self
    }

    /// The default in words, for the help, where it is not a value of the option.
    pub const fn otherwise(mut self, text: &'static str) -> Self {
        self.otherwise = text;
        self
    }

    /// Sets the rule for values.
    pub const fn check(mut self, check: Check<T>) -> Self {
        self.check = check;
        self
    }

    /// Sets the rule for resumed runs.
    pub const fn on_resume(mut self, rule: OnResume) -> Self {
        self.on_resume = rule;
        self
    }

    /// The option belongs to the methods of these kinds, whose adapter configs contain its value.
    pub const fn of(mut self, kinds: &'static [&'static str]) -> Self {
        self.part = Part::Methods(kinds);
        self.from_adapter = true;
        self
    }

    /// Whether the config of an adapter to start from contains it.
    pub const fn in_adapter(mut self, in_adapter: bool) -> Self {
        self.from_adapter = in_adapter;
        self
    }

    /// The option is in the short help (`-h`) too.
    pub const fn basic(mut self) -> Self {
        self.basic = true;
        self
    }

    /// Sets the same property as the option `other`: a layer may give one of the two.
    pub const fn excludes(mut self, other: &'static str) -> Self {
        self.excludes = Some(other);
        self
    }

    /// What is wrong with `value`, if it breaks the rule.
    pub fn fault(&self, name: &str, value: Option<&T>) -> Option<Fault> {
        let Check { refused, fault, remedy } = self.check;
        let value = value.and_then(refused)?;
        Some(Fault { option: name.to_owned(), value, sentence: format!("{fault}; {remedy}") })
    }

    /// The default; `group` has the other options.
    pub fn usual(&self, group: &G) -> Option<T> {
        (self.default)(group)
    }
}

impl<G: Default, T: Serialize> Definition<G, T> {
    /// The definition without the type of its values.
    pub fn facts(&self, field: &str, heading: &'static str) -> Facts {
        let default = self.usual(&G::default()).and_then(|value| shown(&Value::try_from(value).ok()?));
        let otherwise = Some(self.otherwise.to_owned()).filter(|text| !text.is_empty());
        Facts {
            name: field.replace('_', "-"),
            value: self.value,
            heading,
            default: default.or(otherwise),
            remedy: self.check.remedy,
            on_resume: self.on_resume,
            part: self.part,
            from_adapter: self.from_adapter,
            excludes: self.excludes,
            basic: self.basic,
        }
    }
}

/// A rule for the values of an option.
pub struct Check<T> {
    /// The value as text, if it breaks the rule.
    pub refused: fn(&T) -> Option<String>,
    /// The part of the message after option and value: `is too small`.
    pub fault: &'static str,
    /// The end of the message, `give ..`; also used for values that cannot be parsed.
    pub remedy: &'static str,
}

impl<T> Clone for Check<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Check<T> {}

/// A value that breaks the rule of its option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Name of the option, without dashes.
    pub option: String,
    /// The value as text.
    pub value: String,
    /// What is wrong and what to do.
    pub sentence: String,
}

/// `value` as text, if it is not `good`.
pub fn unless(good: bool, value: impl Display) -> Option<String> {
    (!good).then(|| value.to_string())
}

/// Counts of at least 1.
pub const FROM_ONE: Check<usize> = Check {
    refused: |&count| unless(count > 0, count),
    fault: "is too small",
    remedy: "give a whole number from 1",
};

/// Finite numbers above 0.
pub const fn above_zero(remedy: &'static str) -> Check<f64> {
    Check {
        refused: |&number| unless(number.is_finite() && number > 0.0, number),
        fault: "is no finite number above 0",
        remedy,
    }
}

/// Finite numbers of at least 0.
pub const fn from_zero(remedy: &'static str) -> Check<f64> {
    Check {
        refused: |&number| unless(number.is_finite() && number >= 0.0, number),
        fault: "is no finite number from 0",
        remedy,
    }
}

/// Fractions in 0 .. 1, without 1.
pub const BELOW_ONE: Check<f64> = Check {
    refused: |number| unless((0.0..1.0).contains(number), number),
    fault: "is not from 0 to below 1",
    remedy: "give a number from 0 to below 1, such as 0.1",
};

/// The rule for an option of a resumed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnResume {
    /// It must be the same as in the run, because results depend on it.
    Same,
    /// It has its own rule: base and data are compared by fingerprint, device and precision as properties of
    /// the machine, a choice of the memory plan is kept, and the length may grow.
    OwnRule,
    /// It may change: no result depends on it.
    Free,
    /// It belongs to one call: it may change and is not written to the run folder.
    OfTheCall,
}

/// The runs that an option belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Every run, whatever it trains.
    Run,
    /// Runs that train a method of one of these kinds, by their names in [`engraft_adapters::kinds`].
    Methods(&'static [&'static str]),
}

impl Part {
    /// Whether an option of this part means something where these kinds are trained.
    pub fn is_of(self, kinds: &Kinds) -> bool {
        match self {
            Self::Run => true,
            Self::Methods(own) => own.iter().any(|kind| kinds.contains(kind)),
        }
    }
}

/// An option without the type of its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Long name without the dashes, which is also the key in a config file.
    pub name: String,
    /// Name of a value in the help; `BOOL` for a switch.
    pub value: &'static str,
    /// Heading in the help; empty for none.
    pub heading: &'static str,
    /// The default as the help shows it.
    pub default: Option<String>,
    /// The advice for a value that cannot be parsed, `give ..`; empty where the type has its own.
    pub remedy: &'static str,
    /// The rule for resumed runs.
    pub on_resume: OnResume,
    /// The runs that it belongs to.
    pub part: Part,
    /// Whether the config of an adapter to start from contains it.
    pub from_adapter: bool,
    /// The option that sets the same property in another way.
    pub excludes: Option<&'static str>,
    /// Whether it is in the short help.
    pub basic: bool,
}

impl Facts {
    /// `arg` with the value's name, the heading and the default.
    pub fn complete(&self, arg: clap::Arg) -> clap::Arg {
        let mut arg = arg.value_name(self.value).hide_short_help(!self.basic);
        if self.value == "BOOL" {
            arg = arg.num_args(0..=1).require_equals(true).default_missing_value("true");
            arg = arg.hide_possible_values(true);
        }
        if !self.heading.is_empty() {
            arg = arg.help_heading(self.heading);
        }
        let Some(default) = &self.default else { return arg };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        arg.help(format!("{help} [default: {default}]"))
    }
}

/// A default as the help shows it; `None` for a switch that is off.
fn shown(value: &Value) -> Option<String> {
    match value {
        Value::Boolean(false) => None,
        Value::String(text) => Some(text.clone()),
        Value::Float(number) => Some(number.to_string()),
        Value::Array(items) => Some(items.iter().filter_map(shown).collect::<Vec<_>>().join(",")),
        other => Some(other.to_string()),
    }
}

/// A group of options.
pub trait Options: Sized {
    /// The options of the group itself.
    fn own_facts() -> Vec<Facts>;

    /// The options of the group and of the groups in it.
    fn facts() -> Vec<Facts>;

    /// Fills in the defaults of options that are `wanted` and were not given.
    fn fill(&mut self, wanted: &dyn Fn(&Facts) -> bool);

    /// The first given value that breaks its rule.
    fn fault(&self) -> Option<Fault>;

    /// Checks all given values.
    ///
    /// # Errors
    /// [`Error::Input`] with the first value that breaks its rule, its option and the remedy.
    fn check(&self) -> Result<()> {
        match self.fault() {
            None => Ok(()),
            Some(Fault { option, value, sentence }) => {
                Err(Error::input(format!("--{option} {value}: {sentence}")))
            }
        }
    }
}

/// Declares a struct of options.
///
/// The fields in braces after the name are groups of options. The options follow under the headings of the
/// help: the help text as doc comment, the field (its name with dashes is the option), the type, optionally a
/// constant default, and after `=>` the rest of the [`Definition`]. Each option is an `Option` field; one with
/// a constant default also gets a method of its name that returns the value or the default.
macro_rules! options {
    (
        $(#[$of_struct:meta])*
        $name:ident { $($(#[$of_group:meta])* $group:ident: $group_type:ty),* $(,)? }
        $($heading:literal {
            $($(#[$of_field:meta])* $field:ident: $type:ty $(= $default:expr)? => $definition:expr;)*
        })*
    ) => {
        $(#[$of_struct])*
        #[derive(Debug, Clone, Default, PartialEq, clap::Args)]
        #[command(mut_args({
            let facts = <$name as $crate::cli::common::options::Options>::own_facts();
            move |arg| match facts.iter().find(|facts| arg.get_long() == Some(facts.name.as_str())) {
                Some(facts) => facts.complete(arg),
                None => arg,
            }
        }))]
        #[allow(missing_docs, reason = "the doc comments are the help texts")]
        pub struct $name {
            $($(#[$of_group])* #[command(flatten)] pub $group: $group_type,)*
            $($($(#[$of_field])* #[arg(long)] pub $field: Option<$type>,)*)*
        }

        impl $name {
            $($($(
                #[doc = concat!("The value of `", stringify!($field), "`, or the default.")]
                #[allow(dead_code, reason = "not every default is asked for")]
                pub fn $field(&self) -> $type {
                    self.$field.clone().unwrap_or_else(|| $default)
                }
            )?)*)*
        }

        impl $crate::cli::common::options::Options for $name {
            fn own_facts() -> Vec<$crate::cli::common::options::Facts> {
                vec![$($(options!(@definition $name, $field, $type, [$($default)?], $definition)
                    .facts(stringify!($field), $heading),)*)*]
            }

            fn facts() -> Vec<$crate::cli::common::options::Facts> {
                let mut all = Vec::new();
                $(all.extend(<$group_type as $crate::cli::common::options::Options>::facts());)*
                all.extend(Self::own_facts());
                all
            }

            fn fill(&mut self, wanted: &dyn Fn(&$crate::cli::common::options::Facts) -> bool) {
                $(self.$group.fill(wanted);)*
                $($({
                    let definition = options!(@definition $name, $field, $type, [$($default)?], $definition);
                    if self.$field.is_none() && wanted(&definition.facts(stringify!($field), $heading)) {
                        self.$field = definition.usual(self);
                    }
                })*)*
            }

            fn fault(&self) -> Option<$crate::cli::common::options::Fault> {
                $(if let Some(fault) = self.$group.fault() {
                    return Some(fault);
                })*
                $($({
                    let definition = options!(@definition $name, $field, $type, [$($default)?], $definition);
                    let name = stringify!($field).replace('_', "-");
                    if let Some(fault) = definition.fault(&name, self.$field.as_ref()) {
                        return Some(fault);
                    }
                })*)*
                None
            }
        }
    };
    (@definition $name:ident, $field:ident, $type:ty, [], $definition:expr) => {{
        const DEFINITION: $crate::cli::common::options::Definition<$name, $type> = $definition;
        DEFINITION
    }};
    (@definition $name:ident, $field:ident, $type:ty, [$default:expr], $definition:expr) => {{
        const DEFINITION: $crate::cli::common::options::Definition<$name, $type> =
            $definition.default(|_| Some($default));
        DEFINITION
    }};
}
pub(in crate::cli) use options;
