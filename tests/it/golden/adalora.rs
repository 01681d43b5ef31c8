//! AdaLoRA against PEFT: loss with the penalty, gradients, ten steps with their allocations, and files.

use super::{base, check_all, load};

/// With the penalty in loss and gradient, and ranks that are taken away after steps, the same ones as in PEFT. Also files
/// that PEFT wrote with the ranks that were left, and trains further.
#[test]
fn adalora_matches_peft() {
    let base = base("tiny");
    for name in ["adalora", "adalora_layers", "adalora_allocated"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
}
