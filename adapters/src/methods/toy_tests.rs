//! A method that exists in tests alone and has every part there is. With its line in the registry it is complete:
//! resolved, started from weights, saved as PEFT files, described and read again by the code of all methods.

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, BaseWeights, Contribution, EmbeddingDelta, Error, Group, Lora, NormVectors,
    NormWeights, OutputScale, Prompt, Result, SiteVectors,
    init::Init,
    layout::Slots,
    peft::{self, Fields, Files, Findings, TensorFile},
    testing,
};

/// Frozen factors of rank r that all layers share, learned d, e, u and g at one site; the second norm of every layer, and
/// the gain of the last one; a delta on the embedding of tokens, and virtual tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToySpec {
    rank: usize,
}

/// The site in the tests' base: inputs 6, outputs 24.
const SITE: usize = 2;
/// Number of virtual tokens.
const PROMPT: usize = 2;
const SLOW: Group = Group { lr_factor: 0.25, weight_decay: Some(0.0), trainable: true };

impl Default for ToySpec {
    fn default() -> Self {
        Self { rank: 3 }
    }
}

impl ToySpec {
    pub(crate) const KIND: Kind =
        Kind { name: "toy", peft_type: "TOY", claims: |_| true, read: StoredToy::read };
}

impl Method for ToySpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let (rank, site) = (self.rank, &base.sites[SITE]);
        let mut all = Contribution::default();
        for layer in 0..base.layers {
            let name = |what: &str| format!("{}.{what}", site.module(layer));
            all.loras.push(Lora {
                layer,
                site: SITE,
                part: None,
                columns: 0..site.outputs,
                rank,
                alpha: 1.0,
                scale: 1.0,
                a: slots.push_to(Group::FROZEN, "shared.A", &[rank, site.inputs])?,
                b: slots.push_to(Group::FROZEN, "shared.B", &[site.outputs, rank])?,
                d: Some(slots.push(name("d"), &[rank])?),
                e: Some(slots.push(name("e"), &[site.outputs])?),
            });
            let vector = slots.push_to(SLOW, name("g"), &[site.outputs])?;
            all.vectors.push(SiteVectors {
                layer,
                site: SITE,
                u: Some(slots.push(name("u"), &[site.inputs])?),
                g: Some(OutputScale { vector, over_norms: true, with_bias: false }),
                bias: None,
            });
            let (gain, bias) =
                (slots.push(name("gain"), &[base.width])?, slots.push(name("bias"), &[base.width])?);
            all.norms.push(NormVectors { layer: Some(layer), norm: 1, gain: Some(gain), bias: Some(bias) });
        }
        let gain = slots.push("last.gain", &[base.width])?;
        all.norms.push(NormVectors { layer: None, norm: 0, gain: Some(gain), bias: None });
        all.embedding = Some(EmbeddingDelta {
            rank,
            scale: 0.5,
            a: slots.push("embedding.A", &[rank, base.vocab])?,
            b: slots.push("embedding.B", &[base.width, rank])?,
        });
        let embeddings = slots.push("prompt", &[PROMPT, base.width])?;
        all.prompt = Some(Prompt { length: PROMPT, embeddings });
        Ok(all)
    }

    /// Factors are drawn, d and u are 1, e and B of the embedding are 0, g is the norm of each column of W, virtual tokens
    /// are those of ids 3 and 4; norms are those of the base.
    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        let slots = &set.layout.tensors;
        for lora in set.loras_of(&Self::KIND) {
            from.uniform(values, &slots[lora.a], slots[lora.a].shape[1]);
            from.normal(values, &slots[lora.b]);
            lora.d.iter().for_each(|&d| values[slots[d].range()].fill(1.0));
        }
        for vectors in &set.vectors {
            vectors.u.iter().for_each(|&u| values[slots[u].range()].fill(1.0));
            let Some(g) = vectors.g else { continue };
            let g = &mut values[slots[g.vector].range()];
            let w = from.matrix("toy", vectors.site, vectors.layer)?;
            for row in w.chunks(g.len()) {
                g.iter_mut().zip(row).for_each(|(g, w)| *g += w * w);
            }
            g.iter_mut().for_each(|g| *g = g.sqrt());
        }
        for norm in &set.norms {
            let NormWeights { gain, bias } = from.norm("toy", norm.layer, norm.norm)?;
            for (tensor, start) in [(norm.gain, gain), (norm.bias, bias)] {
                tensor.iter().for_each(|&at| values[slots[at].range()].copy_from_slice(&start));
            }
        }
        if let (Some(delta), Some(prompt)) = (&set.embedding, &set.prompt) {
            from.normal(values, &slots[delta.a]);
            let rows = from.token_embeddings("toy", &[3, 4])?;
            values[slots[prompt.embeddings].range()].copy_from_slice(&rows);
        }
        Ok(())
    }

    fn matched(&self, _: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        vec![format!("toy on {}", base.sites[SITE].name)]
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("kind", format!("toy, rank {}", self.rank))]
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let config = peft::config_text(&Self::KIND, base, [("r", json!(self.rank))]);
        Ok(Files::plain(config, &Self::KIND, set, values, base))
    }
}

#[derive(Debug)]
struct StoredToy(ToySpec);

impl StoredToy {
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        Some(Box::new(Self(ToySpec { rank: fields.need("r", "a whole number is expected")? })))
    }
}

impl Stored for StoredToy {
    fn kind(&self) -> &'static Kind {
        &ToySpec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        AdapterSpec { toy: Some(self.0.clone()), ..AdapterSpec::default() }
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        let set = findings.accept(AdapterSet::new(&self.spec(tensors), base))?;
        findings.plain(tensors, &set);
        Some(set)
    }
}

// ---- tests ----

fn spec(lora: bool) -> AdapterSpec {
    let lora = lora.then(crate::LoraSpec::default);
    AdapterSpec { lora, toy: Some(ToySpec::default()), ..AdapterSpec::default() }
}

/// Weights whose element i is i + layer; gains of 1 + layer and biases of 0.5, of the last norm 9 and 0.5.
struct Counted;

impl BaseWeights for Counted {
    fn matrix(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        let site = testing::base().sites.get(site)?.clone();
        Some((0..site.inputs * site.outputs).map(|i| (i + layer) as f32).collect())
    }

    fn column_norms(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        Some(testing::column_norms(&self.matrix(site, layer)?, testing::base().sites.get(site)?.outputs))
    }

    fn bias(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        Some(vec![0.25 + (site + 10 * layer) as f32; testing::base().sites.get(site)?.outputs])
    }

    fn norm(&self, layer: Option<usize>, _: usize) -> Option<NormWeights> {
        let gain = layer.map_or(9.0, |layer| 1.0 + layer as f32);
        Some(NormWeights { gain: vec![gain; testing::D], bias: vec![0.5; testing::D] })
    }

    /// Every element of a row is its id.
    fn token_embeddings(&self, ids: &[u32]) -> Option<Vec<f32>> {
        Some(ids.iter().flat_map(|&id| vec![id as f32; testing::D]).collect())
    }
}

#[test]
fn shared_and_frozen_tensors_are_in_the_layout_once_and_groups_are_told() {
    let set = AdapterSet::new(&spec(false), &testing::base()).unwrap();
    let names: Vec<&str> = set.layout.tensors.iter().map(|slot| slot.name.as_str()).collect();
    assert_eq!(names[..3], ["shared.A", "shared.B", "transformer.h.0.mlp.c_fc.d"]);
    assert_eq!(names.len(), 2 + 3 * 6 + 1 + 3);
    assert_eq!(names[21..], ["embedding.A", "embedding.B", "prompt"]);
    assert_eq!((set.prefix_len(), set.prompt_len()), (0, 2));
    assert!(set.loras.iter().all(|lora| (lora.a, lora.b) == (0, 1)));
    let frozen = 3 * 6 + 24 * 3;
    let in_front = 3 * 11 + 6 * 3 + 2 * 6;
    let learned = 3 * (3 + 24 + 24 + 6 + 2 * 6) + 6 + in_front;
    assert_eq!((set.layout.len, set.trainables()), (frozen + learned, learned));
    let norms: Vec<_> = set.norms.iter().map(|norm| (norm.layer, norm.norm, norm.bias.is_some())).collect();
    assert_eq!(norms, [(Some(0), 1, true), (Some(1), 1, true), (Some(2), 1, true), (None, 0, false)]);
    let segments = set.layout.segments();
    assert_eq!(segments[0].group, Group::FROZEN);
    assert_eq!((segments[4].group, segments[5].group), (SLOW, Group::DEFAULT));
    let mut end = 0;
    for segment in segments {
        assert_eq!(segment.offset, end);
        end = segment.range().end;
    }
    // Two shapes under one name are refused.
    let mut layout = crate::Layout::default();
    let mut slots = Slots::new(&mut layout, "toy");
    slots.push("x", &[2, 3]).unwrap();
    assert!(matches!(slots.push("x", &[3, 2]), Err(Error::SharedShape { .. })));
}

#[test]
fn initial_values_may_follow_from_weights() {
    let set = AdapterSet::new(&spec(true), &testing::base()).unwrap();
    assert!(matches!(set.init(1), Err(Error::WeightsNeeded { method: "toy" })));
    let values = set.init_from(1, Some(&Counted)).unwrap();
    let of = |name: &str| &values[set.layout.slot(name).unwrap().range()];
    // Column 5 of layer 2: elements 5 + 2 + 24 row.
    let norm = (0..6).map(|row| ((7 + 24 * row) as f32).powi(2)).sum::<f32>().sqrt();
    assert!((of("transformer.h.2.mlp.c_fc.g")[5] / norm - 1.0).abs() < 1e-6);
    assert_eq!(of("transformer.h.1.mlp.c_fc.d"), [1.0; 3]);
    assert_eq!(of("transformer.h.1.mlp.c_fc.gain"), [2.0; 6]);
    assert_eq!((of("transformer.h.1.mlp.c_fc.bias"), of("last.gain")), (&[0.5; 6][..], &[9.0; 6][..]));
    assert!(of("shared.B").iter().all(|&x| x != 0.0));
    assert_eq!(of("prompt"), [[3.0; 6], [4.0; 6]].concat());
    assert!(of("embedding.A").iter().all(|&x| x != 0.0) && of("embedding.B").iter().all(|&x| x == 0.0));
    // The LoRA beside it starts as it does alone.
    let alone = AdapterSet::new(&crate::LoraSpec::default().into(), &testing::base()).unwrap();
    assert_eq!(values[..alone.layout.len], alone.init(1).unwrap());
}

#[test]
fn it_is_saved_described_and_read_like_any_method_alone_and_beside_another() {
    for lora in [false, true] {
        let base = testing::base();
        let set = AdapterSet::new(&spec(lora), &base).unwrap();
        let values = set.init_from(1, Some(&Counted)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("adapter");
        peft::save(&dir, &set, &values, None, &base).unwrap();
        assert_eq!(dir.join("toy").is_dir(), lora);
        let loaded = peft::load(&dir, &base, false).unwrap();
        assert_eq!((loaded.set.layout, loaded.values), (set.layout, values));
        assert_eq!((loaded.set.loras, loaded.set.vectors), (set.loras, set.vectors));
        assert_eq!(loaded.set.norms, set.norms);
        assert_eq!((loaded.set.embedding, loaded.set.prompt), (set.embedding, set.prompt));
        let text = peft::describe(&dir).unwrap().to_string();
        assert!(text.contains("kind         toy, rank 3") && text.contains("shared.B F32 [24, 3]"), "{text}");
        let json = serde_json::to_string(&set.spec).unwrap();
        assert_eq!(serde_json::from_str::<AdapterSpec>(&json).unwrap(), set.spec);
    }
}

#[test]
fn two_methods_cannot_bring_one_prompt_or_one_delta_of_the_embedding() {
    let set = AdapterSet::new(&spec(false), &testing::base()).unwrap();
    let (embedding, prompt) = (set.embedding, set.prompt);
    let delta = || Contribution { embedding: embedding.clone(), ..Contribution::default() };
    let prompt = || Contribution { prompt: prompt.clone(), ..Contribution::default() };
    let mut all = delta();
    all.extend(prompt()).unwrap();
    for twice in [delta(), prompt()] {
        assert!(matches!(all.extend(twice), Err(Error::Conflict { .. })));
    }
}

#[test]
fn two_methods_cannot_scale_one_output() {
    let set = AdapterSet::new(&spec(false), &testing::base()).unwrap();
    let own = || Contribution { vectors: set.vectors.clone(), ..Contribution::default() };
    let mut all = own();
    assert!(matches!(all.extend(own()), Err(Error::Conflict { .. })));
    // Vectors of another layer, and another vector of the same site, have room.
    let mut all = Contribution::default();
    let [first, second, _] = set.vectors.clone().try_into().unwrap();
    let bias = SiteVectors { u: None, g: None, bias: Some(0), ..second.clone() };
    for vectors in [second, first, bias] {
        all.extend(Contribution { vectors: vec![vectors], ..Contribution::default() }).unwrap();
    }
    let places: Vec<_> = all.vectors.iter().map(|vectors| (vectors.layer, vectors.bias)).collect();
    assert_eq!(places, [(0, None), (1, Some(0))]);
}

#[test]
fn two_methods_cannot_have_one_norm() {
    let set = AdapterSet::new(&spec(false), &testing::base()).unwrap();
    let [first, second, _, last] = set.norms.clone().try_into().unwrap();
    let of = |norm: &NormVectors| Contribution { norms: vec![norm.clone()], ..Contribution::default() };
    let mut all = of(&last);
    assert!(matches!(all.extend(of(&last)), Err(Error::Conflict { .. })));
    // A bias beside the gain, another norm of a layer and other layers have room.
    let bias = NormVectors { gain: None, bias: Some(0), ..last };
    let other = NormVectors { norm: 0, ..second.clone() };
    for norm in [&second, &bias, &first, &other] {
        all.extend(of(norm)).unwrap();
    }
    let places: Vec<_> = all.norms.iter().map(|norm| (norm.layer, norm.norm)).collect();
    assert_eq!(places, [(Some(0), 1), (Some(1), 0), (Some(1), 1), (None, 0)]);
    assert_eq!((all.norms[3].gain, all.norms[3].bias), (last.gain, Some(0)));
}

/// Where code, less tests and comments, names a method: its own file, the registry, and the crate's exports. The
/// model's bindings and kernels name none at all; so a method touches its file, the registry, and the bindings
/// where it brings a new kind of part.
#[test]
fn adding_a_method_touches_its_file_and_the_registry() {
    use std::{fs, path::Path};
    fn walk(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let named = |folders: &[&str], names: &[&str]| {
        let mut files = Vec::new();
        folders.iter().for_each(|folder| walk(&root.join(folder), &mut files));
        assert!(files.len() > 10, "{folders:?}");
        let names_one = |path: &Path| {
            let text = fs::read_to_string(path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            let mut lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            lines.any(|line| {
                let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
                words.any(|word| names.contains(&word))
            })
        };
        let is_test = |path: &Path| path.to_string_lossy().ends_with("_tests.rs");
        let is_code = |path: &Path| path.extension().is_some_and(|end| end == "rs") && !is_test(path);
        // What folds into weights of candle models is no part of the registry: adapters/src/candle names its methods.
        let is_registered = |path: &Path| !path.starts_with(root.join("adapters/src/candle"));
        let found = files.iter().filter(|path| is_code(path) && is_registered(path) && names_one(path));
        let mut found: Vec<String> =
            found.map(|path| path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/")).collect();
        found.sort();
        found
    };
    let own = ["adapters/src"];
    // A method that everything here works with is named by the registry alone, besides its own file.
    assert_eq!(named(&own, &["toy", "ToySpec"]), ["adapters/src/methods/mod.rs"]);
    let lora = ["LoraSpec", "StoredLora", "LORA", "META_SPEC"];
    let files = ["adapters/src/lib.rs", "adapters/src/methods/lora.rs", "adapters/src/methods/mod.rs"];
    // DoRA has a LoRA's deltas and files; a LoRA has files of its own below it; combining is of LoRAs alone, and files of
    // other programs hold nothing else.
    let more = ["dora.rs", "lora/beside.rs", "lora/files.rs", "lora/initial.rs"]
        .map(|file| format!("adapters/src/methods/{file}"));
    let mut all: Vec<String> = files.iter().map(ToString::to_string).chain(more).collect();
    all.extend(["combine.rs", "plain.rs"].map(|file| format!("adapters/src/{file}")));
    all.sort();
    assert_eq!(named(&own, &lora), all);
    let prefix = ["PrefixSpec", "StoredPrefix", "PREFIX_TUNING"];
    let mut files = files.map(|file| file.replace("lora.rs", "prefix.rs"));
    files.sort();
    assert_eq!(named(&own, &prefix), files);
    let rooms = ["src/model", "src/kernels", "src/optim", "src/generate", "src/device", "src/data"];
    assert_eq!(named(&rooms, &["LoraSpec", "PrefixSpec", "ToySpec"]), [""; 0]);
}
