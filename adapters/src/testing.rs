//! A small base for this crate's tests: odd sizes, a fused projection with parts.

use crate::{BaseDescription, NormDescription, PartDescription, SiteDescription};

/// Width of the residual stream.
pub const D: usize = 6;

/// Norms of the columns of `matrix`, which has rows of `outputs` elements.
pub fn column_norms(matrix: &[f32], outputs: usize) -> Vec<f32> {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let sum = |j: usize| matrix.iter().skip(j).step_by(outputs).map(|&x| square(x)).sum::<f64>();
    (0..outputs).map(|j| sum(j).sqrt() as f32).collect()
}

/// Three layers of width 6 with two heads.
pub fn base() -> BaseDescription {
    let parts = ["q", "k", "v"].iter().enumerate();
    let parts = parts
        .map(|(i, name)| PartDescription { name: (*name).to_owned(), columns: i * D..(i + 1) * D })
        .collect();
    BaseDescription {
        name: "tiny/base".to_owned(),
        revision: Some("v1".to_owned()),
        fingerprint: Some("f00d".to_owned()),
        layers: 3,
        heads: 2,
        width: D,
        positions: 32,
        vocab: 11,
        sites: vec![
            site("attn.c_attn", D, 3 * D, parts),
            site("attn.c_proj", D, D, vec![]),
            site("mlp.c_fc", D, 4 * D, vec![]),
            site("mlp.c_proj", 4 * D, D, vec![]),
        ],
        token_embedding: Some("transformer.wte".to_owned()),
        norms: ["h.{layer}.ln_1", "h.{layer}.ln_2", "ln_f"].map(norm).into(),
    }
}

fn norm(path: &str) -> NormDescription {
    let name = path.rsplit('.').next().unwrap_or(path).to_owned();
    NormDescription { name, key: format!("transformer.{path}") }
}

fn site(name: &str, inputs: usize, outputs: usize, parts: Vec<PartDescription>) -> SiteDescription {
    let key = format!("transformer.h.{{layer}}.{name}");
    SiteDescription { name: name.to_owned(), key, inputs, outputs, fan_in_fan_out: true, parts }
}
