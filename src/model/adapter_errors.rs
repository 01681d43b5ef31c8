//! How an error of the adapters crate is told to a user: with the option that sets the wrong property.

use engraft_adapters::Problem;

use crate::error::Error;

/// What the adapters crate calls a property, and the option that sets it.
const OPTIONS: &[(&str, &str)] = &[
    ("targets:", "--targets:"),
    ("layers:", "--layers:"),
    ("rank:", "--rank:"),
    ("init_r:", "--init-r:"),
    ("target_r:", "--target-r:"),
    ("tinit:", "--tinit:"),
    ("delta_t:", "--delta-t:"),
    ("beta1:", "--importance-beta1:"),
    ("beta2:", "--importance-beta2:"),
    ("orth_reg_weight:", "--orth-reg-weight:"),
    ("alpha:", "--alpha:"),
    ("rank_pattern", "--rank-pattern"),
    ("alpha_pattern", "--alpha-pattern"),
    ("dropout:", "--lora-dropout:"),
    ("saved_norms:", "--train-norms:"),
    ("lora_plus_ratio:", "--lora-plus-ratio:"),
    ("freeze_a:", "--freeze-a:"),
    ("init_lora_weights:", "--init-lora-weights:"),
    ("d_initial:", "--d-initial:"),
    ("feedforward:", "--feedforward:"),
    ("norms:", "--norms:"),
    ("prefix length:", "--prefix-len:"),
    ("prefix projection:", "--prefix-projection:"),
    ("prompt length:", "--prompt-len:"),
    ("method:", "--method:"),
    ("methods:", "--method:"),
];

impl From<engraft_adapters::Error> for Error {
    fn from(error: engraft_adapters::Error) -> Self {
        let text = error.to_string();
        let named =
            OPTIONS.iter().find_map(|(property, option)| Some((option, text.strip_prefix(property)?)));
        let text = named.map_or(text.clone(), |(option, rest)| format!("{option}{rest}"));
        if !error.is_input() {
            return Self::failed(text);
        }
        // What does not fit as well is not taken all the same.
        let problems = error.problems();
        let other_base =
            !problems.is_empty() && problems.iter().all(|problem| matches!(problem, Problem::Base { .. }));
        let found = Self::input(text);
        if other_base { found.hint("--allow-base-mismatch takes it all the same") } else { found }
    }
}
