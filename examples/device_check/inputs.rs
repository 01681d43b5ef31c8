//! Random inputs of the ops that are checked, on either side the same.

use engraft::{
    device::{
        Buffer,
        DType::{self, BF16, F16},
        Device,
        arena::{Arenas, Placement},
    },
    error::Result,
    kernels::{
        matmul::{Matrix, Scales},
        nf4, q8,
    },
    model::BaseDType,
};
use engraft_util::rng;
use half::{bf16, f16};

/// The device of an op and the type of its activations; `rounded` is the type that inputs are rounded to.
#[derive(Clone, Copy)]
pub struct On {
    pub device: Device,
    pub stored: DType,
    pub rounded: DType,
    /// Type that frozen matrices are kept in.
    pub kept: BaseDType,
}

/// A frozen matrix of a check.
pub struct Weight {
    data: Buffer,
    scales: Option<Scales<Buffer>>,
    rows: usize,
    cols: usize,
}

impl Weight {
    pub fn view(&self) -> Matrix<'_> {
        let scales = self.scales.as_ref().map(|scales| match scales {
            Scales::Q8(scales) => Scales::Q8(scales.view()),
            Scales::Nf4 { codes, nested } => Scales::Nf4 { codes: codes.view(), nested: nested.view() },
        });
        Matrix { scales, ..Matrix::f16(self.data.view(), self.rows, self.cols) }
    }
}

pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    (0..len as u64).map(|at| 2.0 * rng::uniform(seed, at) - 1.0).collect()
}

pub fn rounded(values: Vec<f32>, dtype: DType) -> Vec<f32> {
    match dtype {
        F16 => values.into_iter().map(|value| f16::from_f32(value).to_f32()).collect(),
        BF16 => values.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect(),
        _ => values,
    }
}

impl On {
    /// Random activations.
    pub fn activations(self, seed: u64, len: usize) -> Result<Buffer> {
        self.stored_as(rounded(numbers(seed, len), self.rounded))
    }

    pub fn stored_as(self, values: Vec<f32>) -> Result<Buffer> {
        match self.stored {
            F16 => Buffer::on(self.device, &values.into_iter().map(f16::from_f32).collect::<Vec<_>>()),
            BF16 => Buffer::on(self.device, &values.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
            _ => Buffer::on(self.device, &values),
        }
    }

    /// Random frozen weights.
    pub fn frozen(self, seed: u64, len: usize) -> Result<Buffer> {
        Buffer::on(self.device, &numbers(seed, len).into_iter().map(f16::from_f32).collect::<Vec<_>>())
    }

    /// A random frozen matrix `(rows, cols)`, as a base has it on the device.
    pub fn weight(self, seed: u64, rows: usize, cols: usize) -> Result<Weight> {
        let values: Vec<f32> =
            numbers(seed, rows * cols).into_iter().map(|value| f16::from_f32(value).to_f32()).collect();
        let (data, scales) = match self.kept {
            BaseDType::F16 => (self.halves(&values)?, None),
            BaseDType::Q8 => {
                let (mut codes, mut scales) = (vec![0i8; values.len()], Vec::new());
                for (row, codes) in values.chunks(cols).zip(codes.chunks_mut(cols)) {
                    let blocks = row.chunks(q8::BLOCK).zip(codes.chunks_mut(q8::BLOCK));
                    scales.extend(blocks.map(|(values, codes)| q8::quantise(values, codes)));
                }
                (Buffer::on(self.device, &codes)?, Some(Scales::Q8(Buffer::on(self.device, &scales)?)))
            }
            BaseDType::Nf4 => {
                let coded = nf4::quantise(&values, nf4::Sizes { rows, cols });
                let codes = Buffer::on(self.device, &coded.scales)?;
                let nested = Buffer::on(self.device, &coded.nested)?;
                (Buffer::on(self.device, &coded.codes)?, Some(Scales::Nf4 { codes, nested }))
            }
        };
        Ok(Weight { data, scales, rows, cols })
    }

    fn halves(self, values: &[f32]) -> Result<Buffer> {
        match self.stored {
            BF16 => Buffer::on(
                self.device,
                &values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>(),
            ),
            _ => {
                Buffer::on(self.device, &values.iter().map(|&value| f16::from_f32(value)).collect::<Vec<_>>())
            }
        }
    }

    /// The same with frozen matrices kept as `kept`.
    pub fn kept_as(self, kept: BaseDType) -> Self {
        Self { kept, ..self }
    }

    /// Random FP32 values.
    pub fn wide(self, seed: u64, len: usize) -> Result<Buffer> {
        Buffer::on(self.device, &numbers(seed, len))
    }

    /// Zeros of a type.
    pub fn zeros(self, dtype: DType, len: usize) -> Result<Buffer> {
        Arenas::real(None)
            .on(self.device)
            .build("check", Placement::Memory, |arena| arena.take("zeros", dtype, &[len]))
    }

    /// Zeros of the activations' type.
    pub fn room(self, len: usize) -> Result<Buffer> {
        self.zeros(self.stored, len)
    }
}
