//! Devices and the memory that kernels work on: frozen weights, buffers, views and arenas.
//!
//! A [`Frozen`] is read-only by type: nothing in the program can write a base weight. A [`Buffer`] is
//! the unique owner of a range of an arena, so a `View` and a `ViewMut` of the same range cannot
//! coexist. An [`Arena`] either only counts (planning) or really holds memory; the same allocation
//! code runs against both, so a plan and the run it describes cannot drift apart.

use std::{marker::PhantomData, ptr::NonNull, sync::Arc};

use half::f16;

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
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F16 => 2,
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

/// Bytes that outlive every view on them: a mapped file, or data compiled into the program.
pub trait Bytes: AsRef<[u8]> + Send + Sync {}
impl<T: AsRef<[u8]> + Send + Sync> Bytes for T {}

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
        let bytes: &[u8] = (*source).as_ref();
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
        let bytes: &[u8] = (*self.source).as_ref();
        let head = bytes[self.start..].as_ptr();
        View { head, dtype: self.dtype, len: self.len, device: Device::Cpu, life: PhantomData }
    }
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frozen({:?} x {})", self.dtype, self.len)
    }
}

/// Zeroed memory that arenas are cut from.
struct Chunk {
    pages: memmap2::MmapMut,
}

/// A writable range of an arena, owned by nobody else.
pub struct Buffer {
    /// `None` while planning.
    chunk: Option<Arc<Chunk>>,
    head: NonNull<u8>,
    dtype: DType,
    len: usize,
}

// SAFETY: a Buffer is the only handle to its bytes (arenas never hand a range out twice), and the
// bytes are plain numbers, so moving or sharing it follows the rules of a Vec.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A host buffer of its own, outside any arena, holding `values`. For tests and small tools.
    pub fn from_slice<T: Element>(values: &[T]) -> Result<Self> {
        let mut arena = Arena::sized("values", values.len() * T::DTYPE.size() + ALIGN)?;
        let mut buffer = arena.take("values", T::DTYPE, &[values.len()])?;
        buffer.view_mut().host::<T>().copy_from_slice(values);
        Ok(buffer)
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

/// One line of a memory table: a buffer as it was cut from its arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    /// The arena: saved, workspace, gradients ...
    pub role: &'static str,
    /// What the buffer holds.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost first.
    pub shape: Vec<usize>,
}

impl TableRow {
    /// Bytes of the buffer without alignment.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// Every buffer starts on a cache line, which is also enough for AVX-512 loads.
const ALIGN: usize = 64;

/// Memory of one role, handed out front to back and freed as a whole.
pub struct Arena {
    role: &'static str,
    chunk: Option<Arc<Chunk>>,
    used: usize,
    rows: Vec<TableRow>,
}

impl Arena {
    /// An arena that only counts: its buffers have no memory.
    pub fn planning(role: &'static str) -> Self {
        Self { role, chunk: None, used: 0, rows: Vec::new() }
    }

    /// An arena with `bytes` of zeroed host memory; pages are touched on first use.
    ///
    /// # Errors
    /// When the system refuses that much address space.
    pub fn sized(role: &'static str, bytes: usize) -> Result<Self> {
        let pages = memmap2::MmapMut::map_anon(bytes.max(1)).map_err(|cause| {
            Error::failed(format!(
                "{bytes} bytes for {role} cannot be reserved: {cause}; use fewer or shorter rows at a time, or a smaller adapter"
            ))
        })?;
        Ok(Self { role, chunk: Some(Arc::new(Chunk { pages })), used: 0, rows: Vec::new() })
    }

    /// Runs `cut` against a planning arena, then against a real one of exactly that size.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn build<T>(
        role: &'static str,
        mut cut: impl FnMut(&mut Arena) -> Result<T>,
    ) -> Result<(T, Vec<TableRow>)> {
        let mut plan = Self::planning(role);
        cut(&mut plan)?;
        let mut arena = Self::sized(role, plan.used)?;
        let built = cut(&mut arena)?;
        Ok((built, arena.rows))
    }

    /// Bytes handed out so far, alignment included.
    pub fn used(&self) -> usize {
        self.used
    }

    /// The buffers handed out so far.
    pub fn rows(&self) -> &[TableRow] {
        &self.rows
    }

    /// Cuts the next buffer.
    ///
    /// # Errors
    /// When the arena is exhausted: its plan and its use disagree.
    pub fn take(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize]) -> Result<Buffer> {
        let len = shape.iter().product::<usize>();
        let start = self.used;
        let end = start + (len * dtype.size()).next_multiple_of(ALIGN);
        let row = TableRow { role: self.role, name: name.into(), dtype, shape: shape.to_vec() };
        let head = match &self.chunk {
            None => NonNull::dangling(),
            Some(chunk) if end <= chunk.pages.len().next_multiple_of(ALIGN) => {
                // SAFETY: start < end lies inside the mapping, and no other buffer gets this range.
                unsafe { NonNull::new_unchecked(chunk.pages.as_ptr().add(start).cast_mut()) }
            }
            Some(_) => {
                return Err(Error::failed(format!(
                    "the {} arena has no room for {}; its plan is wrong, please report this",
                    self.role, row.name
                )));
            }
        };
        self.used = end;
        self.rows.push(row);
        Ok(Buffer { chunk: self.chunk.clone(), head, dtype, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_and_its_arena_agree() {
        let cut = |arena: &mut Arena| {
            let x = arena.take("x", DType::F32, &[3, 5])?;
            let ids = arena.take("ids", DType::U32, &[7])?;
            Ok((x, ids))
        };
        let ((mut x, ids), rows) = Arena::build("workspace", cut).unwrap();
        assert_eq!(rows.iter().map(TableRow::bytes).sum::<usize>(), 60 + 28);
        x.view_mut().host::<f32>()[14] = 1.5;
        assert_eq!(x.view().slice(14, 1).host::<f32>(), [1.5]);
        assert_eq!(ids.view().host::<u32>(), [0; 7]);
    }

    #[test]
    fn an_exhausted_arena_refuses() {
        let mut arena = Arena::sized("saved", 64).unwrap();
        arena.take("a", DType::F32, &[16]).unwrap();
        assert!(arena.take("b", DType::F32, &[1]).is_err());
    }

    #[test]
    fn a_frozen_range_outside_its_source_is_refused() {
        let source: Arc<dyn Bytes> = Arc::new(vec![0u8; 10]);
        assert!(Frozen::new(source.clone(), 0, DType::F16, 5).is_ok());
        assert!(Frozen::new(source.clone(), 4, DType::F16, 5).is_err());
        assert!(Frozen::new(source, 0, DType::F16, usize::MAX).is_err());
    }
}
