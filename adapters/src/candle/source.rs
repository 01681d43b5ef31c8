//! A PEFT folder as its files describe it, without a base: which method, which modules, which numbers.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{
    Error, LoraSpec, Result, Targets,
    methods::lora::check_values,
    peft::{
        CONFIG_FILE, Fields, Findings, OneOrMany, TensorFile,
        selection::{Selection, targets_field},
    },
};

/// The two files of one method.
#[derive(Debug)]
pub(super) struct Source {
    pub folder: PathBuf,
    /// Name of the base in the config.
    pub base: Option<String>,
    pub method: Method,
    pub tensors: TensorFile,
}

/// A method that can be folded into weights.
#[derive(Debug)]
pub(super) enum Method {
    Lora(Lora),
    Ia3 { selection: Selection, fan_in_fan_out: bool },
    LnTuning,
}

/// A LoRA's config.
#[derive(Debug)]
pub(super) struct Lora {
    pub spec: LoraSpec,
    pub selection: Selection,
    pub fan_in_fan_out: bool,
    /// Whether every module has a magnitude (DoRA).
    pub dora: bool,
    /// Whether every B has a bias.
    pub bias: bool,
}

impl Source {
    pub fn open(folder: PathBuf) -> Result<Self> {
        let mut fields = Fields::open(&folder.join(CONFIG_FILE))?;
        let base = fields.take("base_model_name_or_path", "a name is expected");
        fields.take::<Value>("task_type", ""); // says what the model is for, not what the adapter computes
        fields.take::<Value>("revision", "");
        let method = Method::read(&mut fields);
        let mut findings = Findings::default();
        findings.problems = fields.into_problems();
        if let Some(Method::Lora(lora)) = &method {
            findings.accept(check_values(&lora.spec));
        }
        findings.or_refuse(&folder)?;
        let nothing = || Error::Mismatch { path: folder.clone(), problems: Vec::new() };
        let method = method.ok_or_else(nothing)?; // a method that is not read leaves a problem
        Ok(Self { base, method, tensors: TensorFile::in_folder(&folder)?, folder })
    }

    /// Whether the config and PEFT's rules give the module at `path` an adapter; nothing where they cannot tell.
    pub fn chooses(&self, path: &str) -> Option<bool> {
        match &self.method {
            Method::Lora(Lora { selection, .. }) | Method::Ia3 { selection, .. } => {
                if selection.targets == Targets::AllLinear {
                    return None;
                }
                // Python has expressions that Rust has not, such as (?!..): then the tensors alone decide.
                selection.chooses(path).ok()
            }
            Method::LnTuning => None,
        }
    }
}

impl Method {
    /// Takes the fields of the method that the config names.
    fn read(fields: &mut Fields) -> Option<Self> {
        let foldable = "a method that folds into weights is expected: LORA, IA3 or LN_TUNING";
        let peft_type: String = fields.need("peft_type", foldable)?;
        // Plain tensors in the file: modules that were trained as a whole.
        fields.take::<Value>("modules_to_save", "");
        match peft_type.as_str() {
            "LORA" => Lora::read(fields).map(Self::Lora),
            "IA3" => {
                let names = "names or a regular expression are expected";
                fields.take::<OneOrMany<String>>("feedforward_modules", names); // the shapes say it too
                fields.take::<Value>("init_ia3_weights", "");
                let fan_in_fan_out = fan_in_fan_out(fields);
                Some(Self::Ia3 { selection: Selection::read(fields)?, fan_in_fan_out })
            }
            "LN_TUNING" => {
                targets_field(fields);
                fields.take::<Value>("exclude_modules", "");
                Some(Self::LnTuning)
            }
            _ => {
                fields.refuse("peft_type", &Value::String(peft_type), foldable);
                fields.ignore_the_rest();
                None
            }
        }
    }
}

impl Lora {
    fn read(fields: &mut Fields) -> Option<Self> {
        // Trained biases are plain tensors in the file.
        fields.require("bias", &["none", "all", "lora_only"]);
        let on = "true or false is expected";
        let dora = fields.take("use_dora", on).unwrap_or_default();
        let bias = fields.take("lora_bias", on).unwrap_or_default();
        let fan_in_fan_out = fan_in_fan_out(fields);
        let (spec, selection) = LoraSpec::read(fields)?;
        Some(Self { spec, selection, fan_in_fan_out, dora, bias })
    }

    /// Rank and scale of the module at `path`.
    pub fn rank_and_scale(&self, path: &str) -> Result<(usize, f64)> {
        let (rank, alpha) = self.spec.rank_and_alpha(path)?;
        Ok((rank, self.spec.scale(rank, alpha)))
    }
}

fn fan_in_fan_out(fields: &mut Fields) -> bool {
    fields.take("fan_in_fan_out", "true or false is expected").unwrap_or_default()
}

/// The sources in a folder: its own, or those of several methods below it.
pub(super) fn open_all(folder: &Path) -> Result<Vec<Source>> {
    crate::peft::folders(folder)?.into_iter().map(Source::open).collect()
}
