//! Frozen weights: tensors of the base, read-only by type.
//!
//! A [`Frozen`] has no write access, so nothing in the program can change a base weight.

use std::sync::Arc;

#[cfg(any(feature = "cuda", test))]
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda::memory::{Loader, Memory};
use super::{
    DType, Device, Element,
    arena::{ALIGN as LINE, in_memory},
    kinds::CUDA_ALIGNMENT,
    page_cache::{PIECE, Region, large_pages},
    view::View,
};
use crate::error::{Error, Result};

/// Bytes that outlive every view on them: a mapped file, or data compiled into the program.
pub trait Bytes: Send + Sync {
    /// The bytes that ranges are taken of.
    fn bytes(&self) -> &[u8];

    /// The mapping whose pages can be fetched and released, for bytes of a file.
    fn mapping(&self) -> Option<&memmap2::Mmap> {
        None
    }
}

impl Bytes for memmap2::Mmap {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn mapping(&self) -> Option<&memmap2::Mmap> {
        Some(self)
    }
}

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Bytes for &'static [u8] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Memory of the process that nobody writes any more. It is not a mapping of a file, so its pages are never released.
struct Settled(memmap2::MmapMut);

impl Bytes for Settled {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Order of the bytes of a tensor in a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Order {
    /// The order of the original.
    AsItIs,
    /// A tensor of `rows` rows in strips of `bytes` bytes of every row; a row is a multiple of `bytes`.
    Strips {
        /// Rows of the tensor.
        rows: usize,
        /// Bytes that a strip takes of each row.
        bytes: usize,
    },
}

/// A read-only tensor of the base: a range of a mapped file, of embedded bytes, or of a device's memory.
#[derive(Clone)]
pub struct Frozen {
    source: Source,
    start: usize,
    dtype: DType,
    len: usize,
    /// Its type on a device; an element has the same size there.
    device_dtype: DType,
    /// Elements that follow its own on a device.
    padding: usize,
}

#[derive(Clone)]
enum Source {
    Host(Arc<dyn Bytes>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<Memory>),
}

impl Frozen {
    /// The `len` elements of `dtype` from byte `start` of `source`.
    ///
    /// # Errors
    /// When the range leaves the source or is not aligned for `dtype`.
    pub fn new(source: Arc<dyn Bytes>, start: usize, dtype: DType, len: usize) -> Result<Self> {
        let bytes = source.bytes();
        let inside = len
            .checked_mul(dtype.size())
            .and_then(|size| start.checked_add(size))
            .is_some_and(|end| end <= bytes.len());
        let address = bytes.as_ptr() as usize;
        if !inside || !(address + start).is_multiple_of(dtype.size()) {
            return Err(Error::input(format!(
                "a tensor of {len} elements at byte {start} does not fit a source of {} bytes; the file is damaged",
                bytes.len()
            )));
        }
        Ok(Self { source: Source::Host(source), start, dtype, len, device_dtype: dtype, padding: 0 })
    }

    /// Has an FP16 tensor of the host rounded to BF16, to nearest even, whenever it is copied to a device.
    pub fn round_to_bf16_on_device(&mut self) {
        if self.dtype == DType::F16 {
            self.device_dtype = DType::BF16;
        }
    }

    /// Has `elements` more follow it on a device, where it then has as many more: zeros at first, which ops may write;
    /// what a streamed copy has there is arbitrary.
    pub fn pad_on_device(&mut self, elements: usize) {
        self.padding = elements;
    }

    /// Bytes that it takes on a device.
    pub(crate) fn device_bytes(&self) -> usize {
        ((self.len + self.padding) * self.device_dtype.size()).next_multiple_of(CUDA_ALIGNMENT)
    }

    /// Copies `from`, a piece of the tensor's bytes, to `to` as a device has it.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn copy_for_device(&self, from: &[u8], to: &mut [u8]) {
        if self.device_dtype == self.dtype {
            return to.copy_from_slice(from);
        }
        // Tasks of 32 KiB: of a block of GPT-2 small some 400.
        to.par_chunks_mut(1 << 15).zip(from.par_chunks(1 << 15)).for_each(|(to, from)| {
            for (to, from) in to.chunks_exact_mut(2).zip(from.chunks_exact(2)) {
                let value = f16::from_le_bytes([from[0], from[1]]).to_f32();
                to.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }
        });
    }

    /// Copies tensors of the host into one allocation of `device`; does nothing where that is the host.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has too little, [`Error::Failed`] when it fails.
    pub fn bring(tensors: &mut [&mut Self], device: Device) -> Result<()> {
        match device {
            Device::Cpu => {
                let _ = tensors;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let total = tensors.iter().map(|tensor| tensor.device_bytes()).sum();
                // Of zeros, which paddings are.
                let memory = Arc::new(Memory::for_base(gpu, total)?);
                let mut loader = Loader::new(gpu)?;
                let mut start = 0;
                for tensor in tensors {
                    loader.load(tensor, memory.address() + start as u64)?;
                    let next = start + tensor.device_bytes();
                    **tensor = tensor.on_device(Arc::clone(&memory), start);
                    start = next;
                }
                Ok(())
            }
        }
    }

    /// Copies tensors of mapped files into one allocation of large pages, as far as the system has them, and releases
    /// the pages of the files. Panels are widened from rows with a page each: with 4 KiB pages, translating their
    /// addresses costs more than 1% of a training step. Returns whether it copied: not where there are no large pages,
    /// nor where a tensor is not in a file.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is too little memory; the tensors are then unchanged.
    pub(crate) fn settle(tensors: &mut [(&mut Self, Order)]) -> Result<bool> {
        if !large_pages() || !tensors.iter().all(|(tensor, _)| tensor.is_mapped()) {
            return Ok(false);
        }
        let size = |tensor: &Self| tensor.bytes().next_multiple_of(LINE);
        let total: usize = tensors.iter().map(|(tensor, _)| size(tensor)).sum();
        let mut memory = in_memory("the base", total.max(1))?;
        let mut room = &mut memory[..];
        let mut copies = Vec::new();
        for (tensor, order) in &*tensors {
            let (to, rest) = room.split_at_mut(size(tensor));
            copies.push((&**tensor, *order, to));
            room = rest;
        }
        // Most of the time is spent by the system on clearing pages.
        copies.into_par_iter().with_max_len(1).for_each(|(tensor, order, to)| tensor.copy(order, to));
        let memory: Arc<dyn Bytes> = Arc::new(Settled(memory));
        let mut start = 0;
        for (tensor, _) in tensors {
            let size = size(tensor);
            **tensor = Self { source: Source::Host(Arc::clone(&memory)), start, ..**tensor };
            start += size;
        }
        Ok(true)
    }

    /// Copies a tensor of a file and releases its pages piece by piece: file and copy are never both whole in memory.
    fn copy(&self, order: Order, to: &mut [u8]) {
        let from = self.view().bytes();
        let row = match order {
            Order::AsItIs => 1,
            Order::Strips { rows, .. } => from.len() / rows.max(1),
        };
        let piece = PIECE.next_multiple_of(row.max(1));
        for (index, bytes) in from.chunks(piece).enumerate() {
            match order {
                Order::AsItIs => to[index * piece..][..bytes.len()].copy_from_slice(bytes),
                Order::Strips { rows, bytes: width } => {
                    let first = index * piece / row;
                    for (strip, to) in to[..from.len()].chunks_exact_mut(rows * width).enumerate() {
                        let rows = bytes.chunks_exact(row).zip(to[first * width..].chunks_exact_mut(width));
                        rows.for_each(|(row, to)| to.copy_from_slice(&row[strip * width..][..width]));
                    }
                }
            }
            self.region().part(index * piece, bytes.len()).release();
        }
    }

    /// The tensor of this type and size from byte `start` of a device's memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self, memory: Arc<Memory>, start: usize) -> Self {
        let len = self.len + self.padding;
        debug_assert!(start + len * self.device_dtype.size() <= memory.len());
        Self { source: Source::Cuda(memory), start, dtype: self.device_dtype, len, padding: 0, ..*self }
    }

    /// The device whose memory holds it.
    pub fn device(&self) -> Device {
        match &self.source {
            Source::Host(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Source::Cuda(memory) => Device::Cuda(memory.gpu()),
        }
    }

    /// The transpose of a matrix `(rows, cols)` in strips of `width` of its columns, the last one padded with zeros. Releases
    /// the pages of its file.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no memory for it.
    pub(crate) fn transposed<T: Element>(&self, rows: usize, cols: usize, width: usize) -> Result<Self> {
        let from: &[T] = self.view().host();
        let (strip, len) = (cols * width, rows.next_multiple_of(width) * cols);
        let mut memory = in_memory("the head", (len * size_of::<T>()).max(1))?;
        // SAFETY: the memory begins with a page, and any bits are an element.
        let to = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<T>(), len) };
        to.par_chunks_exact_mut(strip.max(1)).enumerate().for_each(|(index, to)| {
            let from = &from[index * strip..from.len().min((index + 1) * strip)];
            for (column, row) in from.chunks_exact(cols).enumerate() {
                to[column..].iter_mut().step_by(width).zip(row).for_each(|(to, &value)| *to = value);
            }
            self.region().part(index * strip * size_of::<T>(), size_of_val(from)).release();
        });
        let source: Arc<dyn Bytes> = Arc::new(Settled(memory));
        Ok(Self { source: Source::Host(source), start: 0, len, padding: 0, ..*self })
    }

    /// Whether it is in a mapped file.
    fn is_mapped(&self) -> bool {
        match &self.source {
            Source::Host(source) => source.mapping().is_some(),
            #[cfg(feature = "cuda")]
            Source::Cuda(_) => false,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Read access to all elements.
    pub fn view(&self) -> View<'_> {
        let head = match &self.source {
            Source::Host(source) => source.bytes()[self.start..].as_ptr(),
            #[cfg(feature = "cuda")]
            Source::Cuda(memory) => std::ptr::without_provenance(memory.address() as usize + self.start),
        };
        // SAFETY: the range was checked to be inside the source, which lives as long as the view and is never written.
        unsafe { View::raw(head, self.dtype, self.len, self.device()) }
    }

    /// Bytes of the tensor, without padding.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Its pages; an empty region where the host does not see it.
    pub fn region(&self) -> Region {
        match &self.source {
            Source::Host(source) => Region::of_file(Arc::clone(source), self.start, self.bytes()),
            #[cfg(feature = "cuda")]
            Source::Cuda(_) => Region::of_file(Arc::new(Vec::new()), 0, 0),
        }
    }
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frozen({:?} x {})", self.dtype, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::skip;

    #[test]
    fn settled_tensors_keep_their_bytes_and_leave_their_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let numbers: Vec<u8> = (0..PIECE + 1000).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &numbers).unwrap();
        // SAFETY: nobody else has the file.
        let source: Arc<dyn Bytes> = Arc::new(unsafe { memmap2::Mmap::map(file.as_file()) }.unwrap());
        let cut = |start: usize, len: usize| Frozen::new(source.clone(), start, DType::F16, len).unwrap();
        let (mut small, mut large) = (cut(2, 33), cut(100, (PIECE + 700) / 2));
        let moved = Frozen::settle(&mut [(&mut small, Order::AsItIs), (&mut large, Order::AsItIs)]).unwrap();
        assert_eq!(moved, large_pages());
        assert_eq!(small.view().bytes(), &numbers[2..68]);
        assert_eq!(large.view().bytes(), &numbers[100..PIECE + 800]);
        assert_eq!(large.is_mapped(), !large_pages());
        // Pages that belong to no file stay.
        large.region().release();
        assert_eq!(large.view().bytes(), &numbers[100..PIECE + 800]);
        let mut fixed = Frozen::new(Arc::new(vec![7u8; 8]), 0, DType::U8, 8).unwrap();
        assert!(!Frozen::settle(&mut [(&mut small, Order::AsItIs), (&mut fixed, Order::AsItIs)]).unwrap());
        assert_eq!(fixed.view().bytes(), [7; 8]);
    }

    #[test]
    fn a_tensor_is_rounded_for_a_device_that_computes_in_bf16() {
        let values: Vec<f16> = (0..40_001).map(|i| f16::from_f32(0.37 * i as f32 - 900.0)).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut tensor = Frozen::new(Arc::new(bytes.clone()), 0, DType::F16, values.len()).unwrap();
        let copied = |tensor: &Frozen| {
            let mut to = vec![0u8; bytes.len()];
            tensor.copy_for_device(tensor.view().bytes(), &mut to);
            to
        };
        assert_eq!(copied(&tensor), bytes);
        tensor.round_to_bf16_on_device();
        let rounded = copied(&tensor);
        for (at, value) in values.iter().enumerate() {
            let expected = bf16::from_f32(value.to_f32());
            assert_eq!(rounded[2 * at..2 * at + 2], expected.to_le_bytes(), "{value}");
        }
    }

    #[test]
    fn strips_hold_a_few_columns_of_all_rows() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // More than a piece, which is cut between rows.
        let (rows, strips, width) = (PIECE / 150, 3, 64);
        let numbers: Vec<u8> = (0..rows * strips * width).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &numbers).unwrap();
        // SAFETY: nobody else has the file.
        let source: Arc<dyn Bytes> = Arc::new(unsafe { memmap2::Mmap::map(file.as_file()) }.unwrap());
        let mut tensor = Frozen::new(source, 0, DType::F16, numbers.len() / 2).unwrap();
        let moved = Frozen::settle(&mut [(&mut tensor, Order::Strips { rows, bytes: width })]).unwrap();
        assert_eq!(moved, large_pages());
        if !moved {
            skip("the system gives no large pages to copy strips to", false);
        } else {
            let settled = tensor.view().bytes();
            for (row, strip) in [(0, 0), (1, 0), (rows - 1, 1), (7, 2), (rows - 1, 2), (rows / 2, 1)] {
                let expected = &numbers[(row * strips + strip) * width..][..width];
                assert_eq!(&settled[(strip * rows + row) * width..][..width], expected, "{row} {strip}");
            }
        }
    }

    #[test]
    fn a_frozen_range_outside_its_source_is_refused() {
        let source: Arc<dyn Bytes> = Arc::new(vec![0u8; 10]);
        assert!(Frozen::new(source.clone(), 0, DType::F16, 5).is_ok());
        assert!(Frozen::new(source.clone(), 4, DType::F16, 5).is_err());
        assert!(Frozen::new(source, 0, DType::F16, usize::MAX).is_err());
    }
}
