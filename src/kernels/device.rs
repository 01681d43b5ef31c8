//! Devices and the memory that kernels work on: frozen weights, buffers and views.
//!
//! A [`Frozen`] is read-only by type: nothing in the program can write a base weight. A [`Buffer`] is
//! the unique owner of a range of an [`Arena`](super::arena::Arena), so a `View` and a `ViewMut` of the
//! same range cannot coexist.

use std::{marker::PhantomData, ptr::NonNull, sync::Arc};

use half::f16;

use super::{
    arena::{Arenas, Chunk, Place},
    pages::Region,
};
use crate::error::{Error, Result};

/// Element types of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// 32-bit floating point: activations on CPUs, trainables, statistics.
    F32,
    /// 16-bit IEEE floating point: frozen weights.
    F16,
    /// Token ids, positions.
    U32,
    /// Targets, with -100 for "no loss".
    I32,
    /// Codes of 8-bit moments.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F16 => 2,
            Self::U8 => 1,
        }
    }
}

/// Where buffers live and kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// The host's cores, through the global rayon pool.
    #[default]
    Cpu,
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
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

/// Bytes that outlive every view on them: a mapped file, or data compiled into the program.
pub trait Bytes: Send + Sync {
    /// All of them.
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

/// A read-only tensor of the base: a range of a mapped file or of embedded bytes.
#[derive(Clone)]
pub struct Frozen {
    source: Arc<dyn Bytes>,
    start: usize,
    dtype: DType,
    len: usize,
}

impl Frozen {
    /// The `len` elements of `dtype` that begin `start` bytes into `source`.
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
        Ok(Self { source, start, dtype, len })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Read access.
    pub fn view(&self) -> View<'_> {
        let bytes = self.source.bytes();
        let head = bytes[self.start..].as_ptr();
        View { head, dtype: self.dtype, len: self.len, device: Device::Cpu, life: PhantomData }
    }

    /// Bytes of the tensor.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Its pages.
    pub fn region(&self) -> Region {
        Region::of_file(Arc::clone(&self.source), self.start, self.bytes())
    }
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frozen({:?} x {})", self.dtype, self.len)
    }
}

/// A writable range of an arena, owned by nobody else.
pub struct Buffer {
    /// `None` while planning.
    pub(super) chunk: Option<Arc<Chunk>>,
    pub(super) head: NonNull<u8>,
    pub(super) dtype: DType,
    pub(super) len: usize,
}

// SAFETY: a Buffer is the only handle to its bytes (arenas never hand a range out twice), and the
// bytes are plain numbers, so moving or sharing it follows the rules of a Vec.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A host buffer of its own, outside any plan, holding `values`. For tests and small tools.
    pub fn from_slice<T: Element>(values: &[T]) -> Result<Self> {
        let cut = |arena: &mut super::arena::Arena| arena.take("values", T::DTYPE, &[values.len()]);
        let mut buffer = Arenas::real(None).build("values", Place::Memory, cut)?;
        buffer.view_mut().host::<T>().copy_from_slice(values);
        Ok(buffer)
    }

    /// Its pages; `None` while planning.
    pub fn region(&self) -> Option<Region> {
        self.part(0..self.len)
    }

    /// The pages of some of its elements.
    pub fn part(&self, elements: std::ops::Range<usize>) -> Option<Region> {
        let chunk = self.chunk.as_ref()?;
        let start = self.head.as_ptr() as usize - chunk.bytes().as_ptr() as usize;
        let size = self.dtype.size();
        Some(Region::of_chunk(Arc::clone(chunk), start + elements.start * size, elements.len() * size))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Read access.
    ///
    /// # Panics
    /// On a buffer of a planning arena, which has no memory.
    pub fn view(&self) -> View<'_> {
        assert!(self.chunk.is_some(), "a planned buffer has no memory");
        let head = self.head.as_ptr();
        View { head, dtype: self.dtype, len: self.len, device: Device::Cpu, life: PhantomData }
    }

    /// Write access.
    ///
    /// # Panics
    /// On a buffer of a planning arena, which has no memory.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        assert!(self.chunk.is_some(), "a planned buffer has no memory");
        let head = self.head.as_ptr();
        ViewMut { head, dtype: self.dtype, len: self.len, device: Device::Cpu, life: PhantomData }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:?} x {})", self.dtype, self.len)
    }
}

/// Shared access to elements on a device.
#[derive(Clone, Copy)]
pub struct View<'a> {
    head: *const u8,
    dtype: DType,
    len: usize,
    device: Device,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a View is a `&[T]` whose T is known at run time only.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}

impl<'a> View<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the elements live.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The `len` elements from `start` on.
    ///
    /// # Panics
    /// When the range leaves the view.
    pub fn slice(self, start: usize, len: usize) -> View<'a> {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "slice leaves the view");
        // SAFETY: the range was checked to lie inside the view.
        let head = unsafe { self.head.add(start * self.dtype.size()) };
        View { head, len, ..self }
    }

    /// The elements as a host slice.
    ///
    /// # Panics
    /// When `T` is not the view's type: a mistake of the caller that no input can bring about.
    pub fn host<T: Element>(self) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE, "a kernel was handed a buffer of another type");
        // SAFETY: head is aligned and valid for len elements of T for 'a, by construction.
        unsafe { std::slice::from_raw_parts(self.head.cast::<T>(), self.len) }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements' bytes on the host, as the host orders them.
    pub fn bytes(self) -> &'a [u8] {
        match self.device {
            // SAFETY: len elements of the type are valid for 'a, and plain numbers have no padding.
            Device::Cpu => unsafe { std::slice::from_raw_parts(self.head, self.len * self.dtype.size()) },
        }
    }

    /// Copies the elements to the host.
    pub fn to_vec<T: Element>(self) -> Vec<T> {
        match self.device {
            Device::Cpu => self.host::<T>().to_vec(),
        }
    }
}

impl<'a, T: Element> From<&'a [T]> for View<'a> {
    fn from(values: &'a [T]) -> Self {
        let head = values.as_ptr().cast();
        View { head, dtype: T::DTYPE, len: values.len(), device: Device::Cpu, life: PhantomData }
    }
}

/// Exclusive access to elements on a device.
pub struct ViewMut<'a> {
    head: *mut u8,
    dtype: DType,
    len: usize,
    device: Device,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: a ViewMut is a `&mut [T]` whose T is known at run time only.
unsafe impl Send for ViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the elements live.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The same access for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { head: self.head, dtype: self.dtype, len: self.len, device: self.device, life: PhantomData }
    }

    /// Read access for as long as this borrow lasts.
    pub fn as_view(&self) -> View<'_> {
        View { head: self.head, dtype: self.dtype, len: self.len, device: self.device, life: PhantomData }
    }

    /// The `len` elements from `start` on.
    ///
    /// # Panics
    /// When the range leaves the view.
    pub fn slice(self, start: usize, len: usize) -> ViewMut<'a> {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "slice leaves the view");
        // SAFETY: the range was checked to lie inside the view.
        let head = unsafe { self.head.add(start * self.dtype.size()) };
        ViewMut { head, dtype: self.dtype, len, device: self.device, life: PhantomData }
    }

    /// The elements before `at`, and the others.
    ///
    /// # Panics
    /// When `at` lies behind the end.
    pub fn split_at(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        assert!(at <= self.len, "split leaves the view");
        let (dtype, device, life) = (self.dtype, self.device, PhantomData);
        // SAFETY: at was checked to lie inside the view.
        let tail = unsafe { self.head.add(at * dtype.size()) };
        let right = ViewMut { head: tail, dtype, len: self.len - at, device, life };
        (ViewMut { head: self.head, dtype, len: at, device, life }, right)
    }

    /// Sets every FP32 element to zero.
    pub fn clear(self) {
        match self.device {
            Device::Cpu => self.host::<f32>().fill(0.0),
        }
    }

    /// Copies `values`, as many as there are, to the first elements.
    ///
    /// # Panics
    /// When there are more values than elements.
    pub fn upload<T: Element>(self, values: &[T]) {
        match self.device {
            Device::Cpu => self.host::<T>()[..values.len()].copy_from_slice(values),
        }
    }

    /// Copies `bytes`, as the host orders them and of any alignment, to all elements.
    ///
    /// # Panics
    /// When there are not as many bytes as the elements have.
    pub fn upload_bytes(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len * self.dtype.size(), "bytes do not fit the view");
        match self.device {
            // SAFETY: the elements are valid, exclusively borrowed and of that many bytes; any bits are
            // a number of every type.
            Device::Cpu => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.head, bytes.len()) },
        }
    }

    /// The elements as a host slice.
    ///
    /// # Panics
    /// When `T` is not the view's type: a mistake of the caller that no input can bring about.
    pub fn host<T: Element>(self) -> &'a mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "a kernel was handed a buffer of another type");
        // SAFETY: head is aligned and valid for len elements of T for 'a, and not aliased.
        unsafe { std::slice::from_raw_parts_mut(self.head.cast::<T>(), self.len) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for ViewMut<'a> {
    fn from(values: &'a mut [T]) -> Self {
        let len = values.len();
        let head = values.as_mut_ptr().cast();
        ViewMut { head, dtype: T::DTYPE, len, device: Device::Cpu, life: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frozen_range_outside_its_source_is_refused() {
        let source: Arc<dyn Bytes> = Arc::new(vec![0u8; 10]);
        assert!(Frozen::new(source.clone(), 0, DType::F16, 5).is_ok());
        assert!(Frozen::new(source.clone(), 4, DType::F16, 5).is_err());
        assert!(Frozen::new(source, 0, DType::F16, usize::MAX).is_err());
    }
}
