//! One definition for each option: name, help, default, check, config key and resume rule.
//!
//! [`options!`] takes the definitions of a group of options and makes a struct of them, which clap fills
//! from the command line and serde from a config file. Everything else that must know the options asks
//! [`Options::facts`]: the help text, the layers of config files, the identity of a run, the tests of the manual.

use std::fmt::Display;

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
}

/// A switch: `--name` alone is true, `--name=false` takes back what a config file says.
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
    }
}

impl<G, T> Definition<G, T> {
    /// The value where none is given, which may depend on other options of the group.
    pub const fn default(mut self, default: fn(&G) -> Option<T>) -> Self {
        self.default = default;
        self
    }

    /// What the help names as default where it is no value.
    pub const fn otherwise(mut self, text: &'static str) -> Self {
        self.otherwise = text;
        self
    }

    /// Refuses values that make no sense.
    pub const fn check(mut self, check: Check<T>) -> Self {
        self.check = check;
        self
    }

    /// What a resumed run may do with the option.
    pub const fn on_resume(mut self, rule: OnResume) -> Self {
        self.on_resume = rule;
        self
    }

    /// Means something for that part alone, and is part of an adapter's config.
    pub const fn of(mut self, part: Part) -> Self {
        self.part = part;
        self.from_adapter = true;
        self
    }

    /// Whether the config of an adapter to start from gives it.
    pub const fn in_adapter(mut self, in_adapter: bool) -> Self {
        self.from_adapter = in_adapter;
        self
    }

    /// Says the same as the option `other` in another way: a layer may give one of the two.
    pub const fn excludes(mut self, other: &'static str) -> Self {
        self.excludes = Some(other);
        self
    }

    /// Refuses `value` if it makes no sense.
    ///
    /// # Errors
    /// A sentence with the option, the value and the remedy.
    pub fn refuse(&self, name: &str, value: Option<&T>) -> Result<()> {
        let Check { refused, fault, remedy } = self.check;
        match value.and_then(refused) {
            None => Ok(()),
            Some(value) => Err(Error::input(format!("--{name} {value}: {fault}; {remedy}"))),
        }
    }

    /// The value if none is given, where `group` has the other options.
    pub fn usual(&self, group: &G) -> Option<T> {
        (self.default)(group)
    }
}

impl<G: Default, T: Serialize> Definition<G, T> {
    /// What does not depend on the type of values.
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
        }
    }
}

/// A rule for the values of an option.
pub struct Check<T> {
    /// The value as text, if it breaks the rule.
    pub refused: fn(&T) -> Option<String>,
    /// Follows the option and the value in the message.
    pub fault: &'static str,
    /// Ends the message, and says what to give where the value cannot be read at all.
    pub remedy: &'static str,
}

impl<T> Clone for Check<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Check<T> {}

/// `value` as text, unless it is good.
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

/// Finite numbers from 0.
pub const fn from_zero(remedy: &'static str) -> Check<f64> {
    Check {
        refused: |&number| unless(number.is_finite() && number >= 0.0, number),
        fault: "is no finite number from 0",
        remedy,
    }
}

/// Parts of a whole that leave something of it.
pub const BELOW_ONE: Check<f64> = Check {
    refused: |number| unless((0.0..1.0).contains(number), number),
    fault: "is not from 0 to below 1",
    remedy: "give a number from 0 to below 1, such as 0.1",
};

/// What a resumed run may do with an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnResume {
    /// It must be the same as in the run, because results depend on it.
    Same,
    /// It has a rule of its own: base and data are compared by fingerprint, device and precision as the
    /// machine, a choice of the memory plan is kept, and the length may grow.
    OwnRule,
    /// It may change: it never reaches the adapter.
    Free,
    /// It belongs to one call: it may change and is not written to the run folder.
    OfTheCall,
}

/// What an option means something for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Every run.
    Run,
    /// Runs that train a LoRA.
    Lora,
    /// Runs that train a prefix.
    Prefix,
}

/// An option without the type of its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Long name without the dashes, which is also the key in a config file.
    pub name: String,
    /// What the help calls a value; `BOOL` for a switch.
    pub value: &'static str,
    /// Heading in the help; empty for none.
    pub heading: &'static str,
    /// The default as the help shows it.
    pub default: Option<String>,
    /// What to give instead of a value that cannot be read; empty where the type says it.
    pub remedy: &'static str,
    /// What a resumed run may do with it.
    pub on_resume: OnResume,
    /// What it means something for.
    pub part: Part,
    /// Whether the config of an adapter to start from gives it.
    pub from_adapter: bool,
    /// The option that says the same in another way.
    pub excludes: Option<&'static str>,
}

impl Facts {
    /// Completes what clap knows of the option.
    pub fn complete(&self, arg: clap::Arg) -> clap::Arg {
        let mut arg = arg.value_name(self.value);
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

/// A default as the help shows it; nothing for a switch that is off.
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

    /// Refuses values that make no sense.
    ///
    /// # Errors
    /// The first such value.
    fn check(&self) -> Result<()>;
}

/// A struct of options from their definitions.
///
/// The fields in braces after the name are groups of options. The options follow under the headings of the
/// help: the help text as doc comment, the field (whose name with dashes is the option), the type, perhaps a
/// default that depends on nothing, and after `=>` the rest of the [`Definition`]. Each option is an `Option`
/// field; one with such a default also gets a method of its name that gives the value or the default.
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

            fn check(&self) -> $crate::error::Result<()> {
                $(self.$group.check()?;)*
                $($(options!(@definition $name, $field, $type, [$($default)?], $definition)
                    .refuse(&stringify!($field).replace('_', "-"), self.$field.as_ref())?;)*)*
                Ok(())
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
