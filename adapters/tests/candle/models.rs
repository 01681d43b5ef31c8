//! Models of candle-transformers with adapters folded in, against the models that PEFT merged.

use candle_core::{DType, Device, IndexOp, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{bert, bigcode, llama};
use engraft_adapters::candle::{Adapter, with_adapter};

use crate::support::{Tensors, adapter_of, base, builder, distance, expected};

/// For [`apart`]: sums of F32 in another order than PyTorch's, with other vector instructions on each CPU.
const TOLERANCE: f64 = 5e-6;

/// Largest difference, relative to the largest element of `expected`.
fn apart(found: &Tensor, expected: &Tensor) -> f64 {
    distance(found, expected) / distance(expected, &expected.zeros_like().unwrap())
}

/// Logits (b, t, v) of a causal model that gives those of the last token: one pass for each length.
fn at_every_token(ids: &Tensor, mut last: impl FnMut(&Tensor) -> Tensor) -> Tensor {
    let t = ids.dim(1).unwrap();
    let logits: Vec<Tensor> = (1..=t).map(|length| last(&ids.i((.., ..length)).unwrap())).collect();
    Tensor::stack(&logits, 1).unwrap()
}

fn bigcode(vb: VarBuilder, ids: &Tensor) -> Tensor {
    let config = bigcode::Config {
        vocab_size: 37,
        max_position_embeddings: 16,
        num_hidden_layers: 2,
        hidden_size: 24,
        layer_norm_epsilon: 1e-5,
        n_inner: Some(40),
        num_attention_heads: 3,
        multi_query: true,
        use_cache: false,
    };
    let mut model = bigcode::GPTBigCode::load(vb, config).unwrap();
    at_every_token(ids, |ids| model.forward(&ids.contiguous().unwrap(), 0).unwrap())
}

fn llama(vb: VarBuilder, ids: &Tensor, tied: bool) -> Tensor {
    let config = llama::Config {
        hidden_size: 24,
        intermediate_size: 40,
        vocab_size: 37,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 16,
        tie_word_embeddings: tied,
    };
    let model = llama::Llama::load(vb, &config).unwrap();
    let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
    at_every_token(ids, |ids| model.forward(&ids.contiguous().unwrap(), 0, &mut cache).unwrap())
}

fn bert_config() -> bert::Config {
    bert::Config {
        vocab_size: 37,
        hidden_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 3,
        intermediate_size: 40,
        max_position_embeddings: 16,
        layer_norm_eps: 1e-5,
        ..bert::Config::default()
    }
}

/// The last hidden state (b, t, c).
fn bert_hidden(vb: VarBuilder, ids: &Tensor) -> Tensor {
    bert::BertModel::load(vb, &bert_config()).unwrap().forward(ids, &ids.zeros_like().unwrap(), None).unwrap()
}

fn bert_logits(vb: VarBuilder, ids: &Tensor) -> Tensor {
    bert::BertForMaskedLM::load(vb, &bert_config())
        .unwrap()
        .forward(ids, &ids.zeros_like().unwrap(), None)
        .unwrap()
}

fn run(name: &str, vb: VarBuilder, ids: &Tensor) -> Tensor {
    match name {
        "bigcode" => bigcode(vb, ids),
        "llama" => llama(vb, ids, false),
        "llama_tied" => llama(vb, ids, true),
        "bert" => bert_logits(vb, ids),
        _ => bert_hidden(vb, ids),
    }
}

#[test]
fn every_model_computes_what_peft_merged() {
    for (case, name) in [
        ("bigcode_lora", "bigcode"),
        ("bigcode_biases", "bigcode"),
        ("bigcode_ia3", "bigcode"),
        ("bigcode_ln_tuning", "bigcode"),
        ("llama_dora", "llama"),
        ("llama_layers", "llama"),
        ("llama_all_linear", "llama"),
        ("llama_tied_embedding", "llama_tied"),
        ("bert_lora_bias", "bert"),
        ("bert_inner", "bert_inner"),
    ] {
        let expected = expected(case);
        let weights = || base(name.trim_end_matches("_inner"));
        let plain = run(name, builder(weights()), &expected["input_ids"]);
        let (vb, adapter) =
            with_adapter(builder(weights()), adapter_of(case), DType::F32, &Device::Cpu).unwrap();
        let found = run(name, vb, &expected["input_ids"]);
        let error = apart(&found, &expected["outputs"]);
        assert!(error < TOLERANCE, "{case}: {error}");
        assert!(distance(&plain, &expected["outputs"]) > 1e-2, "{case}: the base alone gives the same");
        adapter.finish().unwrap();
    }
}

/// Names without the first segment, as smaller models are stored.
fn without_prefix(weights: Tensors, prefix: &str) -> Tensors {
    let short = |(name, x): (String, Tensor)| Some((name.strip_prefix(prefix)?.to_owned(), x));
    weights.into_iter().filter_map(short).collect()
}

#[test]
fn a_prefix_that_only_the_model_or_only_the_adapter_has_is_noticed() {
    let expected = expected("bert_lora_bias");
    let hidden = |vb| apart(&bert_hidden(vb, &expected["input_ids"]), &expected["hidden"]);
    let open = || Adapter::open(adapter_of("bert_lora_bias")).unwrap();
    let fold = |adapter: &Adapter, vb| adapter.fold_into(vb, DType::F32, &Device::Cpu);

    // Both have `bert.`; the model finds it itself, or is given the builder below it, either before or after.
    for place in ["", "after", "before"] {
        let adapter = open();
        let vb = match place {
            "after" => fold(&adapter, builder(base("bert"))).pp("bert"),
            "before" => fold(&adapter, builder(base("bert")).pp("bert")),
            _ => fold(&adapter, builder(base("bert"))),
        };
        assert!(hidden(vb) < TOLERANCE, "{place}");
        // The head was not loaded.
        let unused = adapter.unused();
        assert_eq!(
            unused,
            ["cls.predictions.transform.dense.bias", "cls.predictions.transform.dense.weight"]
        );
        let text = adapter.finish().unwrap_err().to_string();
        assert!(text.contains("did not load 2 parameters") && text.contains("cls.predictions"), "{text}");
    }
    // The base lacks the prefix, the adapter has it.
    let adapter = open();
    assert!(hidden(fold(&adapter, builder(without_prefix(base("bert"), "bert.")))) < TOLERANCE);
    assert_eq!(adapter.unused().len(), 2);
    // Own names need a function.
    let renamed =
        base("bert").into_iter().map(|(name, x)| (name.replace("encoder.layer", "blocks"), x)).collect();
    let adapter = open().rename_f(|name| name.replace("blocks", "encoder.layer"));
    let vb = fold(&adapter, builder(renamed)).rename_f(|name| name.replace("encoder.layer", "blocks"));
    assert!(hidden(vb) < TOLERANCE);
    assert_eq!(adapter.unused().len(), 2);
}

#[test]
fn two_adapters_add_up() {
    let ids = expected("bigcode_ln_tuning")["input_ids"].clone();
    let both = |order: [&str; 2]| {
        let mut vb = builder(base("bigcode"));
        for case in order {
            vb = with_adapter(vb, adapter_of(case), DType::F32, &Device::Cpu).unwrap().0;
        }
        bigcode(vb, &ids)
    };
    let (one, other) =
        (both(["bigcode_lora", "bigcode_ln_tuning"]), both(["bigcode_ln_tuning", "bigcode_lora"]));
    assert_eq!(distance(&one, &other), 0.0); // they change different parameters
    assert!(distance(&one, &expected("bigcode_lora")["outputs"]) > 1e-2);
    assert!(distance(&one, &expected("bigcode_ln_tuning")["outputs"]) > 1e-2);
}
