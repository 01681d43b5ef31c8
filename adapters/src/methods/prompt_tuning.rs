//! Prompt tuning: learned embeddings in front of the text (Lester et al. 2021, arXiv:2104.08691).
//!
//! Initial values: N(0, 1), as PEFT's `PromptEmbedding` holds them in a `torch.nn.Embedding`. PEFT's other two ways
//! take the base's embeddings of tokens; whoever knows the tokens writes them over these.
//!
//! P-tuning (Liu et al. 2021, arXiv:2103.10385) makes such embeddings by a small network. PEFT's files hold only what
//! the network yields, so they are read as a prompt.

use engraft_util::words::count_of;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Prompt, Result,
    init::Init,
    layout::Slots,
    peft::{
        self, Fields, Files, Findings, TensorFile,
        virtual_tokens::{TENSOR, VirtualTokens},
    },
};

/// A prompt: `length` learned embeddings in front of the text's own (Lester et al. 2021, arXiv:2104.08691).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromptTuningSpec {
    /// Length P in virtual tokens.
    pub length: usize,
}

impl Default for PromptTuningSpec {
    fn default() -> Self {
        Self { length: 20 }
    }
}

/// P-tuning: PEFT's files of it are read, and it is not trained.
pub(crate) const P_TUNING: Kind =
    Kind { name: "p_tuning", peft_type: "P_TUNING", claims: |_| true, read: StoredPrompt::read_encoded };

/// Fields with which PEFT makes new virtual tokens, without effect on finished ones.
const OF_THE_START: [&str; 4] =
    ["prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path"];
/// Fields of the network of P-tuning, which the files do not hold.
const OF_THE_ENCODER: [&str; 4] =
    ["encoder_dropout", "encoder_hidden_size", "encoder_num_layers", "encoder_reparameterization_type"];

impl PromptTuningSpec {
    /// The kind `prompt_tuning`.
    pub const KIND: Kind = Kind {
        name: "prompt_tuning",
        peft_type: "PROMPT_TUNING",
        claims: |_| true,
        read: StoredPrompt::read,
    };
}

impl Method for PromptTuningSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let length = self.length;
        if length == 0 || length >= base.positions {
            return Err(Error::PromptLength { length, positions: base.positions });
        }
        let embeddings = slots.push(TENSOR, &[length, base.width])?;
        Ok(Contribution { prompt: Some(Prompt { length, embeddings }), ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        if let Some(prompt) = &set.prompt {
            from.normal(values, &set.layout.tensors[prompt.embeddings]);
        }
        Ok(())
    }

    fn matched(&self, _: &AdapterSet, _: &BaseDescription) -> Vec<String> {
        vec![format!("{} in front of the text", count_of(self.length, "virtual token"))]
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("kind", format!("{}, {}", Self::KIND.name, count_of(self.length, "virtual token")))]
    }

    /// PEFT asks for a tokenizer where a config says that the tokens were those of a text, so none says it.
    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let own = OF_THE_START.map(|name| (name, Value::Null)).into_iter();
        let own = own.chain([("modules_to_save", Value::Null), ("prompt_tuning_init", json!("RANDOM"))]);
        let fields = own.chain(VirtualTokens::fields(self.length, base));
        Ok(Files::plain(peft::config_text(&Self::KIND, base, fields), &Self::KIND, set, values, base))
    }
}

/// A prompt as its config has it.
#[derive(Debug)]
struct StoredPrompt {
    tokens: VirtualTokens,
    /// Whether P-tuning made it.
    encoded: bool,
}

impl StoredPrompt {
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        fields.ignore(&OF_THE_START);
        Some(Box::new(Self { tokens: VirtualTokens::take(fields)?, encoded: false }))
    }

    fn read_encoded(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        fields.ignore(&OF_THE_ENCODER);
        Some(Box::new(Self { tokens: VirtualTokens::take(fields)?, encoded: true }))
    }
}

impl Stored for StoredPrompt {
    fn kind(&self) -> &'static Kind {
        &PromptTuningSpec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        PromptTuningSpec { length: self.tokens.length }.into()
    }

    fn hint(&self) -> Option<&'static str> {
        let text = "the virtual tokens were made by the encoder of P-tuning, which the files do not hold; they are \
                    read as those of prompt tuning";
        self.encoded.then_some(text)
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        self.tokens.check(base.width, tensors, base, findings);
        findings.accept(AdapterSet::new(&self.spec(tensors), base))
    }
}

#[cfg(test)]
#[path = "prompt_tuning_tests.rs"]
mod tests;
