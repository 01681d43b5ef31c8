//! Golden files and small tensors for these tests.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use serde_json::Value;

pub type Tensors = HashMap<String, Tensor>;

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The adapter's folder of a case.
pub fn adapter_of(case: &str) -> PathBuf {
    golden().join("cases").join(case).join("adapter")
}

pub fn expected(case: &str) -> Tensors {
    candle_core::safetensors::load(
        golden().join("cases").join(case).join("expected.safetensors"),
        &Device::Cpu,
    )
    .unwrap()
}

/// The weights of a base: F16, as they are stored.
pub fn base(name: &str) -> Tensors {
    candle_core::safetensors::load(golden().join("bases").join(format!("{name}.safetensors")), &Device::Cpu)
        .unwrap()
}

pub fn builder(tensors: Tensors) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)
}

/// Largest difference of two tensors of one shape.
#[track_caller]
pub fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.shape(), b.shape());
    let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
    (wide(a) - wide(b)).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// Values in [-1, 1] that follow no pattern, the same for a seed.
pub fn noise(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f64> = (0..shape.iter().product::<usize>())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// A copy of a case's adapter that a test may change.
pub struct Copy {
    folder: tempfile::TempDir,
}

impl Copy {
    pub fn of(case: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::write(folder.path().join(name), fs::read(adapter_of(case).join(name)).unwrap()).unwrap();
        }
        Self { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn set(self, field: &str, value: Value) -> Self {
        let path = self.path().join("adapter_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = value;
        fs::write(path, config.to_string()).unwrap();
        self
    }

    pub fn tensors(self, change: impl FnOnce(&mut Tensors)) -> Self {
        let path = self.path().join("adapter_model.safetensors");
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, path).unwrap();
        self
    }
}
