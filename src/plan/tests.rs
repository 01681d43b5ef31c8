//! Bytes of a base against what they must add up to, and the plan of a job that trains nothing.

use std::{fmt, path::Path};

use engraft_adapters::{AdapterSet, AdapterSpec, LoraSpec};

use super::{
    calibrate::Rates,
    predict::{MicroBatch, Update},
    *,
};
use crate::{
    device::{
        DType, DeviceKind, OwnMemory,
        arena::{Arenas, Placement, TableRow},
    },
    error::Result,
    kernels::matmul::Arithmetic,
    model::{BaseDType, Config, Policy},
    observe::phase::Phase,
};

fn cuda_memory() -> &'static OwnMemory {
    DeviceKind::CUDA.own_memory.as_ref().unwrap()
}

fn xl() -> Config {
    let text = r#"{"model_type":"gpt2","n_layer":48,"n_embd":1600,"n_head":25,"n_positions":1024,"vocab_size":50257}"#;
    Config::from_json(text, Path::new("xl")).unwrap()
}

#[test]
fn the_base_counts_every_parameter() {
    // 1,557,611,200 parameters in GPT-2 XL.
    assert_eq!(BaseBytes::of(&xl(), BaseDType::F16).total(), 2 * 1_557_611_200);
}

#[test]
fn a_tensor_of_a_device_begins_at_a_multiple_of_256_bytes() {
    let text = r#"{"model_type":"gpt2","n_layer":2,"n_embd":24,"n_head":3,"n_positions":40,"vocab_size":61}"#;
    let config = Config::from_json(text, Path::new("odd")).unwrap();
    let tensor = |elements: usize| (2 * elements).div_ceil(256) as u64 * 256;
    let norm = 2 * tensor(24);
    // 16 rows follow the weights behind a layer norm.
    let linears = [(24 + 16, 72), (24, 24), (24 + 16, 96), (96, 24)];
    let linears: u64 = linears.into_iter().map(|(a, b)| tensor(a * b) + tensor(b)).sum();
    let total = tensor(61 * 24) + tensor(40 * 24) + norm + 2 * (2 * norm + linears);
    assert_eq!(BaseBytes::on_device(&config, BaseDType::F16, cuda_memory()).total(), total);
    assert!(total > BaseBytes::of(&config, BaseDType::F16).total());
}

/// Generation for several requests at once: the more together, the faster, and the more caches.
struct Server<'a> {
    config: &'a Config,
    set: &'a AdapterSet,
    device: PlannedDevice,
    requests: usize,
}

/// Number of requests that are served at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Together(usize);

impl fmt::Display for Together {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--together {}", self.0)
    }
}

impl Job for Server<'_> {
    type Config = Together;

    fn base(&self) -> PlannedBase<'_> {
        PlannedBase { config: self.config, dtype: BaseDType::F16 }
    }

    fn device(&self) -> PlannedDevice {
        self.device
    }

    fn streams_base(&self, _: Together) -> bool {
        false
    }

    fn buffers(&self, Together(rows): Together) -> Result<Vec<TableRow>> {
        let shape = [rows, self.config.positions, 2 * self.config.width];
        let mut arenas = Arenas::planning();
        arenas.build("cache", Placement::Memory, |arena| {
            let layers = 0..self.config.layers;
            layers
                .map(|layer| arena.take(format!("block {layer} kv"), DType::F16, &shape))
                .collect::<Result<Vec<_>>>()
        })?;
        Ok(arenas.into_rows())
    }

    fn lifetime(&self, _: &TableRow) -> &'static str {
        "request"
    }

    fn resident_of_file(&self, _: Together, row: &Row) -> ByPhase {
        by_phase(|_| row.bytes)
    }

    fn beside(&self, _: Together) -> Vec<Row> {
        vec![Row::new("program", "code", 50 << 20, Placement::Host, "run").always()]
    }

    fn scratch(&self, Together(rows): Together) -> u64 {
        (rows * self.config.vocab * 4) as u64
    }
}

impl Candidates for Server<'_> {
    fn candidates(&self) -> Vec<Together> {
        (1..=self.requests).map(Together).collect()
    }

    fn seconds(&self, Together(rows): Together, rates: &Rates) -> f64 {
        let pass = MicroBatch {
            base: self.base(),
            set: self.set,
            device: self.device,
            batch: rows,
            seq_len: 1,
            supervised: rows,
            policy: Policy::default(),
        };
        pass.seconds(rates) * self.requests.div_ceil(rows) as f64
    }

    fn risk(&self, _: Together) -> f64 {
        1.0
    }

    fn are_alike(&self, one: Together, other: Together) -> bool {
        one == other
    }

    fn differences(&self, now: Together, other: Together) -> Vec<String> {
        (now != other).then(|| format!("together {}", other.0)).into_iter().collect()
    }

    fn savings(&self, _: Together) -> Vec<Together> {
        self.candidates()
    }

    fn last_resorts(&self) -> Vec<LastResort<Together>> {
        Vec::new()
    }

    fn title(&self) -> String {
        format!("{} requests", self.requests)
    }

    fn advice(&self) -> Vec<String> {
        vec!["fewer requests take less".to_owned()]
    }
}

#[test]
fn a_job_that_trains_nothing_is_planned_and_chosen_alike() {
    let config = xl();
    let spec = AdapterSpec::from(LoraSpec::default());
    let set = AdapterSet::new(&spec, &config.describe("xl", None)).unwrap();
    let host = PlannedDevice {
        kind: DeviceKind::CPU,
        cores: Some(Cores { threads: 2, arithmetic: Arithmetic::F32 }),
    };
    // Keys and values of 1024 tokens, FP16.
    let cache = 48 * 1024 * 2 * 1600 * 2;
    for device in [host, PlannedDevice::of_kind(DeviceKind::CUDA, Arithmetic::F32)] {
        let server = Server { config: &config, set: &set, device, requests: 8 };
        let four = plan(&server, Together(4)).unwrap();
        let row = four.rows.iter().find(|row| row.role == "cache").unwrap();
        assert_eq!((row.name.as_str(), row.count, row.bytes), ("block * kv", 48, 4 * cache));
        let base = server.base().bytes(device).total();
        let program = if device == host { 50 << 20 } else { cuda_memory().runtime };
        assert_eq!(four.peak(), (Phase::Forward, base + 4 * cache + program + 4 * 50257 * 4));
        let chosen = choose(&server, Some(four.peak().1), &Rates::NOMINAL_CPU).unwrap();
        assert_eq!(chosen.chosen.plan.config, Together(4));
        assert!(chosen.remedies[0].starts_with("--together 1 (-"), "{:?}", chosen.remedies);
        assert_eq!(chosen.alternatives.len(), 7);
        let text = choose(&server, Some(1 << 30), &Rates::NOMINAL_CPU).unwrap_err().to_string();
        assert!(
            text.contains("too small for 8 requests") && text.contains("would fit: --together 1"),
            "{text}"
        );
        assert!(text.ends_with("hint: fewer requests take less"), "{text}");
    }
}

#[test]
fn moments_elsewhere_take_time() {
    let update = |moments| Update { trainables: 1_000_000, work: 1.0, bytes: 8.0, moments };
    let seconds = |moments| update(moments).seconds(&Rates::NOMINAL_CPU);
    assert!(seconds(Placement::Memory) < seconds(Placement::Host));
    assert!(seconds(Placement::Host) < seconds(Placement::Disk));
}
