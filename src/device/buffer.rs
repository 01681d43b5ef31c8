//! A buffer: the unique owner of a range of an arena.

use std::{ptr::NonNull, sync::Arc};

use super::{
    DType, Device, Element,
    arena::{Arena, Arenas, Chunk, Placement},
    page_cache::Region,
    view::{View, ViewMut},
};
use crate::error::Result;

/// A writable range of an arena, owned by nobody else.
pub struct Buffer {
    /// The memory that it is a range of; `None` while planning.
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
    /// A host buffer outside any plan that holds `values`. For tests and small tools.
    ///
    /// # Errors
    /// As [`Buffer::on`].
    pub fn from_slice<T: Element>(values: &[T]) -> Result<Self> {
        Self::on(Device::Cpu, values)
    }

    /// A buffer on `device`, outside any plan, that holds `values`.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory) when there is no memory for it.
    pub fn on<T: Element>(device: Device, values: &[T]) -> Result<Self> {
        let cut = |arena: &mut Arena| arena.take("values", T::DTYPE, &[values.len()]);
        let mut buffer = Arenas::real(None).on(device).build("values", Placement::Memory, cut)?;
        buffer.view_mut().upload(values);
        Ok(buffer)
    }

    fn device(&self) -> Device {
        self.chunk.as_ref().map_or(Device::Cpu, |chunk| chunk.device())
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its pages; `None` while planning, and where the host does not see them.
    pub fn region(&self) -> Option<Region> {
        self.part(0..self.len)
    }

    /// The pages of these elements, as [`Buffer::region`].
    pub fn part(&self, elements: std::ops::Range<usize>) -> Option<Region> {
        let chunk = self.chunk.as_ref().filter(|chunk| chunk.device().is_host_visible())?;
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
        // SAFETY: the buffer owns its range, of which nothing is written while it is borrowed.
        unsafe { View::raw(head, self.dtype, self.len, self.device()) }
    }

    /// Write access.
    ///
    /// # Panics
    /// On a buffer of a planning arena, which has no memory.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        assert!(self.chunk.is_some(), "a planned buffer has no memory");
        let head = self.head.as_ptr();
        // SAFETY: the buffer owns its range, and is borrowed exclusively.
        unsafe { ViewMut::raw(head, self.dtype, self.len, self.device()) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:?} x {})", self.dtype, self.len)
    }
}
