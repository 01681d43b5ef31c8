//! Element types of device memory, known at run time.

use half::{bf16, f16};

/// Element types of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floating point: activations on CPUs, trainables, statistics.
    F32,
    /// 16-bit IEEE floating point: frozen weights, and activations on CUDA devices.
    F16,
    /// The upper half of an F32: activations on CUDA devices where they are asked for.
    BF16,
    /// Token ids, positions, rows to gather.
    U32,
    /// Targets, with -100 for "no loss".
    I32,
    /// Unsigned codes of 8-bit moments, and words of 4-bit codes byte by byte.
    U8,
    /// Signed codes of 8-bit weights.
    I8,
}

impl DType {
    /// Its name in options, tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U8 => "u8",
            Self::I8 => "i8",
        }
    }

    /// Bytes of one element, 1 to 4.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }
}

/// A Rust type that stands for a [`DType`] in host memory.
pub trait Element: Copy + Send + Sync + 'static {
    /// The matching run-time type.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
impl Element for i8 {
    const DTYPE: DType = DType::I8;
}
