//! Values on their way to FP16: rounded to nearest even, and refused where FP16 cannot hold them.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use safetensors::Dtype;

use super::{source::Source, stored::Stored};
use crate::error::{Error, Result};

/// Hands a tensor's values to `sink` as little-endian FP16, chunk by chunk.
///
/// # Errors
/// [`Error::Input`] when the tensor cannot be read, or when a value is not finite or rounds to
/// infinity; the first such value and their number are named.
pub(super) fn halves(
    source: &Source,
    stored: &Stored,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut faults = Faults::default();
    let (mut wide, mut narrow, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    source.read(stored, &mut |chunk| {
        if stored.dtype == Dtype::F16 {
            if chunk.chunks_exact(2).fold(false, |bad, two| bad | (two[1] & 0x7c == 0x7c)) {
                faults.scan(chunk, stored.dtype);
            }
            return sink(chunk);
        }
        widen(chunk, stored.dtype, &mut wide);
        narrow.resize(wide.len(), f16::ZERO);
        narrow.convert_from_f32_slice(&wide);
        if !narrow.iter().fold(true, |good, value| good & value.is_finite()) {
            faults.scan(chunk, stored.dtype);
        }
        bytes.clear();
        bytes.extend(narrow.iter().flat_map(|value| value.to_le_bytes()));
        sink(&bytes)
    })?;
    faults.report(source, stored)
}

/// The values of `chunk` in F32.
fn widen(chunk: &[u8], dtype: Dtype, wide: &mut Vec<f32>) {
    wide.clear();
    match dtype {
        Dtype::BF16 => wide.extend(chunk.as_chunks().0.iter().map(|&two| bf16::from_le_bytes(two).to_f32())),
        // Through f16, so that a value is rounded once.
        Dtype::F64 => wide.extend(chunk.as_chunks().0.iter().map(|&eight| {
            let value = f64::from_le_bytes(eight);
            if value.is_finite() { f16::from_f64(value).to_f32() } else { value as f32 }
        })),
        _ => wide.extend(chunk.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four))),
    }
}

/// Values that no FP16 tensor of a base may hold.
#[derive(Default)]
struct Faults {
    not_finite: Option<f64>,
    too_large: Option<f64>,
    count: usize,
}

impl Faults {
    /// Counts the faults of a chunk in the type of its file.
    fn scan(&mut self, chunk: &[u8], dtype: Dtype) {
        match dtype {
            Dtype::F16 => {
                chunk.as_chunks().0.iter().for_each(|&two| self.look(f16::from_le_bytes(two).to_f64()))
            }
            Dtype::BF16 => {
                chunk.as_chunks().0.iter().for_each(|&two| self.look(bf16::from_le_bytes(two).to_f64()))
            }
            Dtype::F64 => chunk.as_chunks().0.iter().for_each(|&eight| self.look(f64::from_le_bytes(eight))),
            _ => chunk.as_chunks().0.iter().for_each(|&four| self.look(f64::from(f32::from_le_bytes(four)))),
        }
    }

    fn look(&mut self, value: f64) {
        if !value.is_finite() {
            self.not_finite.get_or_insert(value);
        } else if f16::from_f64(value).is_infinite() {
            self.too_large.get_or_insert(value);
        } else {
            return;
        }
        self.count += 1;
    }

    fn report(&self, source: &Source, stored: &Stored) -> Result<()> {
        let path = source.path(stored).display();
        let (name, count) = (&stored.name, self.count);
        let values = if count == 1 { "1 value".into() } else { format!("{count} values") };
        match (self.not_finite, self.too_large) {
            (Some(value), _) => Err(Error::input(format!(
                "{path}: {name} holds {values} that cannot be weights, the first {value}; \
                 the model is damaged, choose another"
            ))),
            (None, Some(value)) => Err(Error::input(format!(
                "{path}: {name} holds {values} beyond 65504, the largest that FP16 can hold, the first {value}; \
                 choose a base whose weights fit FP16"
            ))),
            (None, None) => Ok(()),
        }
    }
}
