//! Speeds of this machine, measured with the real kernels: factors of predicted times.
//!
//! Measuring takes about a second and 70 MiB of memory, and then a temporary file of 64 MiB. The result
//! is kept as `calibration.json` in the cache, for BF16 where it is fast as `calibration-bf16.json`, and
//! measured anew for another CPU, number of threads, vector level or build of the program, and after a
//! run that was much faster than they said.

use std::{fs, path::Path};

use engraft_util::atomic;
use serde::{Deserialize, Serialize};

use self::measure::Sizes;
use crate::{
    device::cpu::{dispatch_level, on_pool, release_shared_scratch},
    kernels::matmul::Arithmetic,
    observe::machine,
};

mod measure;

pub use crate::device::rates::{ProductRate, RatePair, RatePoint, Rates};

/// Name of the cached file of an arithmetic.
fn file(arithmetic: Arithmetic) -> &'static str {
    if arithmetic.in_pairs() { "calibration-bf16.json" } else { "calibration.json" }
}

/// FLOP of attention with `pairs` pairs of query and visible key in each of `heads` heads of `width`, forward
/// and backward: 2 and 5 products of 2 `width` FLOP a pair (Dao et al. 2022).
pub fn attention_flops(heads: usize, width: usize, pairs: usize) -> (f64, f64) {
    let product = 2.0 * heads as f64 * width as f64 * pairs as f64;
    (2.0 * product, 5.0 * product)
}

/// Speeds depend on these alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    cpu: String,
    threads: usize,
    level: String,
    program: String,
}

impl Key {
    fn here() -> Self {
        Self {
            cpu: cpu_name(),
            threads: rayon::current_num_threads(),
            level: dispatch_level().to_owned(),
            program: machine::program(),
        }
    }
}

/// The CPU's name, as the system tells it.
pub fn cpu_name() -> String {
    cpu_model(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// The CPU's name: `model name` on x86, implementer and part on Arm.
fn cpu_model(cpuinfo: &str) -> String {
    let field = |wanted: &str| {
        let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == wanted).map(|(_, value)| value.trim().to_owned())
    };
    let arm = || Some(format!("{} {}", field("CPU implementer")?, field("CPU part")?));
    field("model name").or_else(arm).unwrap_or_else(|| "unknown".to_owned())
}

/// Content of the cached file.
#[derive(Debug, Serialize, Deserialize)]
struct CachedRates {
    key: Key,
    rates: Rates,
}

impl Rates {
    /// The rates of an arithmetic in the cache if they are this machine's, or else newly measured ones,
    /// which are then cached.
    ///
    /// A cache that is damaged, cannot be written or is not there is no error: rates are measured again.
    pub fn load_or_measure(cache: Option<&Path>, arithmetic: Arithmetic) -> Rates {
        let path = cache.map(|cache| cache.join(file(arithmetic)));
        Self::load_or(path.as_deref(), &Key::here(), || Self::measure(cache, arithmetic))
    }

    /// The rates in the cache, if they are this machine's.
    pub fn cached(cache: Option<&Path>, arithmetic: Arithmetic) -> Option<Rates> {
        load(&cache?.join(file(arithmetic)), &Key::here())
    }

    /// Removes the cached rates, where they have turned out not to be this machine's: it was busy with
    /// other work when they were measured. The next plan measures again.
    pub fn forget(cache: Option<&Path>, arithmetic: Arithmetic) {
        if let Some(cache) = cache {
            let _ = fs::remove_file(cache.join(file(arithmetic)));
        }
    }

    /// Measures without reading the cache; `folder` is for a temporary file.
    pub fn measure(folder: Option<&Path>, arithmetic: Arithmetic) -> Rates {
        let rates = on_pool(|| measure::all(&Sizes::REAL, folder, arithmetic));
        // May be for more rows than the run has; no plan counts it.
        release_shared_scratch();
        rates
    }

    fn load_or(path: Option<&Path>, key: &Key, measure: impl FnOnce() -> Rates) -> Rates {
        let Some(path) = path else { return measure() };
        if let Some(rates) = load(path, key) {
            return rates;
        }
        let rates = measure();
        store(path, CachedRates { key: key.clone(), rates });
        rates
    }

    fn are_usable(&self) -> bool {
        let Self {
            product_forward,
            product_backward,
            thin,
            attention,
            head,
            layernorm,
            activation,
            adamw,
            reading,
        } = *self;
        let both = |both: RatePair| [both.forward, both.backward];
        let products = [product_forward, product_backward];
        let pairs = [attention, layernorm, activation].into_iter().flat_map(both);
        let points = products.into_iter().flat_map(|product| [product.few.flops, product.many.flops]);
        let mut all = pairs.chain(points).chain([thin, head, adamw, reading]);
        all.all(|rate| rate.is_finite() && rate > 0.0)
            && products.iter().all(|product| 0 < product.few.rows && product.few.rows < product.many.rows)
    }
}

fn load(path: &Path, key: &Key) -> Option<Rates> {
    let stored: CachedRates = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    (stored.key == *key && stored.rates.are_usable()).then_some(stored.rates)
}

/// Tries to cache the rates; if that fails, the next run measures again.
fn store(path: &Path, stored: CachedRates) {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    if let (Ok(()), Ok(text)) = (folder, serde_json::to_vec_pretty(&stored)) {
        let _ = atomic::write(path, &text);
    }
}

#[cfg(test)]
mod tests;
