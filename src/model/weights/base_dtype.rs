//! The tensors of a converted copy of a base: their types, and where in its file they are.

use engraft_util::safetensors::{self as safetensors_file, Entry, Order};
use half::f16;
use safetensors::Dtype;

use super::{convert::Sink, names::Wanted};
use crate::{
    device::DType,
    error::{Error, Result},
    kernels::{
        nf4,
        q8::{self, BLOCK},
    },
    model::arch::{HEAD, POSITION_EMBEDDING, TOKEN_EMBEDDING},
};

/// Types that the matrices of a base are kept in; vectors and positions are FP16 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BaseDType {
    /// Half precision, 2 bytes an element.
    #[default]
    F16,
    /// 8-bit codes with an FP16 scale for each block of 32.
    Q8,
    /// NF4 with double quantisation: 4-bit codes with an 8-bit scale for each 64 inputs of an output. Embeddings and head
    /// stay FP16.
    Nf4,
}

impl BaseDType {
    /// Its name in options and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Nf4 => "nf4",
        }
    }

    /// Type of the elements of the matrices of its linear layers.
    pub fn element_type(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::Q8 => DType::I8,
            Self::Nf4 => DType::U8,
        }
    }

    /// The type in which a base of this one keeps the matrix of that canonical name.
    pub fn of_matrix(self, name: &str) -> Self {
        match self {
            // Positions are no matrix of a product.
            _ if name == POSITION_EMBEDDING => Self::F16,
            Self::Nf4 if name == TOKEN_EMBEDDING || name == HEAD => Self::F16,
            other => other,
        }
    }

    /// Bytes of a matrix `(rows, cols)` that is kept in this type.
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> u64 {
        self.tensor_bytes(rows, cols).map(|bytes| bytes as u64).sum()
    }

    /// Bytes of the tensors of a matrix `(rows, cols)`: its elements, and scales of codes.
    pub fn tensor_bytes(self, rows: usize, cols: usize) -> impl Iterator<Item = usize> {
        let (elements, scales, nested) = match self {
            Self::F16 => (2 * rows * cols, None, None),
            Self::Q8 => (rows * cols, Some(2 * rows * q8::blocks(cols)), None),
            Self::Nf4 => {
                let sizes = nf4::Sizes { rows, cols };
                (sizes.codes(), Some(sizes.scales()), Some(4 * sizes.nested()))
            }
        };
        std::iter::once(elements).chain(scales).chain(nested)
    }

    /// Tensors that a matrix of this type has beside its elements.
    pub fn scale_tensors(self) -> u64 {
        self.tensor_bytes(0, 0).count() as u64 - 1
    }
}

/// The scales of a tensor.
pub(super) fn scales_of(name: &str) -> String {
    format!("{name}.scales")
}

/// The offset and the factors of the scales of a tensor of 4-bit codes.
pub(super) fn nested_of(name: &str) -> String {
    format!("{name}.nested")
}

/// A tensor of a copy, and where it begins after the header.
pub(super) struct Part {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) start: usize,
}

/// The tensors of a copy: first those of 4-bit codes and of FP32, whose words and floats are aligned there; then all
/// FP16 in canonical order, scales of 8-bit codes where the codes would be; then all that is single bytes.
pub(super) fn parts(wanted: &[Wanted], dtype: BaseDType) -> Vec<Part> {
    let (mut first, mut halves, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for tensor in wanted {
        let name = tensor.name.clone();
        match (tensor.shape.as_slice(), tensor.kept(dtype)) {
            (&[rows, cols], BaseDType::Nf4) => {
                let sizes = nf4::Sizes { rows, cols };
                first.push((name, Dtype::U8, vec![sizes.codes()]));
                first.push((nested_of(&tensor.name), Dtype::F32, vec![sizes.nested()]));
                bytes.push((scales_of(&tensor.name), Dtype::U8, vec![cols, sizes.blocks()]));
            }
            (&[rows, cols], BaseDType::Q8) => {
                halves.push((scales_of(&tensor.name), Dtype::F16, vec![rows, q8::blocks(cols)]));
                bytes.push((name, Dtype::I8, tensor.shape.clone()));
            }
            _ => halves.push((name, Dtype::F16, tensor.shape.clone())),
        }
    }
    let mut end = 0;
    let place = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let start = end;
        end += shape.iter().product::<usize>() * size(dtype);
        Part { name, dtype, shape, start }
    };
    first.into_iter().chain(halves).chain(bytes).map(place).collect()
}

/// Bytes of an element of a copy.
pub(super) fn size(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::F16 => 2,
        _ => 1,
    }
}

/// The header of a file of `parts`, padded so that they begin on a cache line.
pub(super) fn header(parts: &[Part]) -> Result<Vec<u8>> {
    let entry = |part: &Part| Entry {
        name: part.name.clone(),
        dtype: part.dtype,
        shape: part.shape.clone(),
        bytes: part.shape.iter().product::<usize>() * size(part.dtype),
    };
    let entries: Vec<Entry> = parts.iter().map(entry).collect();
    let header = safetensors_file::header(&[("format", "pt")].into(), &entries, Order::Given, 64);
    header.map_err(|cause| Error::failed(format!("the header of the converted base cannot be made: {cause}")))
}

/// Makes codes of the values of one tensor after another, as they come.
pub(super) struct Coder<'a, 'f> {
    file: &'a mut Sink<'f>,
    cols: usize,
    /// Values of a block, as far as they are there.
    block: Vec<f32>,
    /// Where the block stands in its row.
    column: usize,
    codes: Vec<i8>,
    scales: Vec<f16>,
    /// Where the next codes go, and where the scales go in the end.
    places: (usize, usize),
}

impl<'a, 'f> Coder<'a, 'f> {
    /// For a tensor of rows of `cols`, whose codes begin at `codes` in the file and its scales at `scales`.
    pub(super) fn new(file: &'a mut Sink<'f>, cols: usize, codes: usize, scales: usize) -> Self {
        let block = Vec::with_capacity(BLOCK);
        Self { file, cols, block, column: 0, codes: Vec::new(), scales: Vec::new(), places: (codes, scales) }
    }

    /// Takes up values, little-endian FP16.
    pub(super) fn take(&mut self, halves: &[u8]) -> Result<()> {
        for &two in halves.as_chunks::<2>().0 {
            self.block.push(f16::from_le_bytes(two).to_f32());
            if self.block.len() == BLOCK.min(self.cols - self.column) {
                self.close();
            }
        }
        self.flush()
    }

    /// Ends a block: its codes and scale are made.
    fn close(&mut self) {
        let start = self.codes.len();
        self.codes.resize(start + self.block.len(), 0);
        self.scales.push(q8::quantise(&self.block, &mut self.codes[start..]));
        self.column = (self.column + self.block.len()) % self.cols;
        self.block.clear();
    }

    /// Writes what codes there are.
    fn flush(&mut self) -> Result<()> {
        // One byte as another: a code is written as two's complement.
        let bytes: Vec<u8> = self.codes.drain(..).map(|code| code.to_le_bytes()[0]).collect();
        self.file.write_at(self.places.0, &bytes)?;
        self.places.0 += bytes.len();
        Ok(())
    }

    /// Writes the scales after all codes.
    pub(super) fn finish(self) -> Result<()> {
        let bytes: Vec<u8> = self.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.file.write_at(self.places.1, &bytes)
    }
}
