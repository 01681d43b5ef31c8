//! Views: shared and exclusive access to elements of a type known at run time, on any device.

use std::{borrow::Cow, marker::PhantomData};

use half::{bf16, f16};

use super::{DType, Device, Element};

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
    /// The `len` elements of `dtype` from `head` in the memory of `device`.
    ///
    /// # Safety
    /// They are valid, aligned for `dtype`, and nobody writes or frees them during `'a`.
    pub(crate) unsafe fn raw(head: *const u8, dtype: DType, len: usize, device: Device) -> Self {
        Self { head, dtype, len, device, life: PhantomData }
    }

    /// Number of elements in the view.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the view has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device whose memory holds the elements.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The `len` elements from index `start`.
    ///
    /// # Panics
    /// When the range leaves the view.
    pub fn slice(self, start: usize, len: usize) -> View<'a> {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "slice leaves the view");
        let head = self.head.wrapping_add(start * self.dtype.size());
        View { head, len, ..self }
    }

    /// The elements as a host slice.
    ///
    /// # Panics
    /// When the view is of a device, or `T` is not its type: a mistake of the caller, which no input causes.
    pub fn host<T: Element>(self) -> &'a [T] {
        assert!(self.device.is_host_visible(), "memory of a device was taken for memory of the host");
        assert_eq!(self.dtype, T::DTYPE, "a kernel was handed a buffer of another type");
        // SAFETY: head is aligned and valid for len elements of T for 'a, by construction.
        unsafe { std::slice::from_raw_parts(self.head.cast::<T>(), self.len) }
    }

    /// Type of the elements in the view.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The same bytes as elements of another type, without a remainder that fills none.
    ///
    /// # Panics
    /// When the first byte is not aligned for the type.
    pub fn typed(self, dtype: DType) -> View<'a> {
        assert!(self.head.addr().is_multiple_of(dtype.size()), "elements of another type begin elsewhere");
        View { dtype, len: self.size() / dtype.size(), ..self }
    }

    /// Bytes of all its elements.
    pub fn size(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Address of the first element in the memory of a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn address(&self) -> u64 {
        self.head.addr() as u64
    }

    /// The elements' bytes on the host, in the host's byte order.
    ///
    /// # Panics
    /// When the view is of a device.
    pub fn bytes(self) -> &'a [u8] {
        assert!(self.device.is_host_visible(), "memory of a device was taken for memory of the host");
        // SAFETY: len elements of the type are valid for 'a, and plain numbers have no padding.
        unsafe { std::slice::from_raw_parts(self.head, self.size()) }
    }

    /// The elements' bytes in the host's byte order: borrowed on the host, copied from a device.
    pub fn to_bytes(self) -> Cow<'a, [u8]> {
        match self.device {
            Device::Cpu => Cow::Borrowed(self.bytes()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Cow::Owned(gpu.download(self.address(), self.size())),
        }
    }

    /// Copies elements of any floating-point type to the host, as FP32.
    ///
    /// # Panics
    /// When they are of another type.
    pub fn to_floats(self) -> Vec<f32> {
        match self.dtype {
            DType::F16 => self.to_vec::<f16>().into_iter().map(f16::to_f32).collect(),
            DType::BF16 => self.to_vec::<bf16>().into_iter().map(bf16::to_f32).collect(),
            _ => self.to_vec(),
        }
    }

    /// Replaces the content of `to` by the elements; from a device through pinned memory, and after waiting for the
    /// device.
    ///
    /// # Panics
    /// When they are of another type.
    pub fn read_into<T: Element>(self, to: &mut Vec<T>) {
        assert_eq!(self.dtype, T::DTYPE, "a buffer is of another type");
        to.clear();
        match self.device {
            Device::Cpu => to.extend_from_slice(self.host()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => gpu.read_into(self, to),
        }
    }

    /// Copies the elements to a new vector on the host.
    ///
    /// # Panics
    /// When `T` is not the view's type.
    pub fn to_vec<T: Element>(self) -> Vec<T> {
        match self.device {
            Device::Cpu => self.host::<T>().to_vec(),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                assert_eq!(self.dtype, T::DTYPE, "a buffer is of another type");
                let bytes = self.to_bytes();
                let mut values: Vec<T> = Vec::with_capacity(self.len);
                // SAFETY: there are that many bytes, and any bits are a number of every type.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), values.as_mut_ptr().cast(), bytes.len());
                    values.set_len(self.len);
                }
                values
            }
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
    /// The `len` elements of `dtype` from `head` in the memory of `device`.
    ///
    /// # Safety
    /// They are valid, aligned for `dtype`, and nobody else uses or frees them during `'a`.
    pub(crate) unsafe fn raw(head: *mut u8, dtype: DType, len: usize, device: Device) -> Self {
        Self { head, dtype, len, device, life: PhantomData }
    }

    /// Number of elements in the view.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the view has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device whose memory holds the elements.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Type of the elements in the view.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Address of the first element in the memory of a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn address(&self) -> u64 {
        self.head.addr() as u64
    }

    /// The same access for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { head: self.head, dtype: self.dtype, len: self.len, device: self.device, life: PhantomData }
    }

    /// Read access for as long as this borrow lasts.
    pub fn as_view(&self) -> View<'_> {
        View { head: self.head, dtype: self.dtype, len: self.len, device: self.device, life: PhantomData }
    }

    /// Read access, for the whole lifetime.
    pub fn into_view(self) -> View<'a> {
        View { head: self.head, dtype: self.dtype, len: self.len, device: self.device, life: PhantomData }
    }

    /// The same bytes as elements of another type, without a remainder that fills none; any bits are a number of
    /// every type.
    ///
    /// # Panics
    /// When the first byte is not aligned for the type.
    pub fn typed(self, dtype: DType) -> ViewMut<'a> {
        assert!(self.head.addr().is_multiple_of(dtype.size()), "elements of another type begin elsewhere");
        let len = self.len * self.dtype.size() / dtype.size();
        ViewMut { head: self.head, dtype, len, device: self.device, life: PhantomData }
    }

    /// The `len` elements from index `start`.
    ///
    /// # Panics
    /// When the range leaves the view.
    pub fn slice(self, start: usize, len: usize) -> ViewMut<'a> {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "slice leaves the view");
        let head = self.head.wrapping_add(start * self.dtype.size());
        ViewMut { head, dtype: self.dtype, len, device: self.device, life: PhantomData }
    }

    /// The elements before index `at`, and those from it on.
    ///
    /// # Panics
    /// When `at` is past the end.
    pub fn split_at(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        assert!(at <= self.len, "split leaves the view");
        let (dtype, device, life) = (self.dtype, self.device, PhantomData);
        let tail = self.head.wrapping_add(at * dtype.size());
        let right = ViewMut { head: tail, dtype, len: self.len - at, device, life };
        (ViewMut { head: self.head, dtype, len: at, device, life }, right)
    }

    /// Sets every FP32 element to zero; on a device every element of any type.
    pub fn clear(self) {
        match self.device {
            Device::Cpu => self.host::<f32>().fill(0.0),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => gpu.clear(self.address(), self.len * self.dtype.size()),
        }
    }

    /// Copies `values` to the first elements.
    ///
    /// # Panics
    /// When there are more values than elements.
    pub fn upload<T: Element>(self, values: &[T]) {
        match self.device {
            Device::Cpu => self.host::<T>()[..values.len()].copy_from_slice(values),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                assert_eq!(self.dtype, T::DTYPE, "a buffer is of another type");
                self.slice(0, values.len()).upload_bytes(View::from(values).bytes());
            }
        }
    }

    /// Copies `bytes`, in the host's byte order and of any alignment, to all elements.
    ///
    /// # Panics
    /// When `bytes` is not as long as the elements.
    pub fn upload_bytes(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len * self.dtype.size(), "bytes do not fit the view");
        match self.device {
            // SAFETY: the elements are valid, exclusively borrowed and of that many bytes; any bits are
            // a number of every type.
            Device::Cpu => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.head, bytes.len()) },
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => gpu.upload(self.address(), bytes),
        }
    }

    /// The elements as a host slice.
    ///
    /// # Panics
    /// When the view is of a device, or `T` is not its type: a mistake of the caller, which no input causes.
    pub fn host<T: Element>(self) -> &'a mut [T] {
        assert!(self.device.is_host_visible(), "memory of a device was taken for memory of the host");
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
