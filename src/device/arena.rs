//! Arenas: memory or a file that buffers are cut from, and the table of the buffers.
//!
//! [`Arenas`] either only count (planning) or hold memory. The same allocation code runs against both, so a plan
//! and the run that it describes cannot drift apart.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

#[cfg(feature = "cuda")]
use super::cuda::memory::{Memory, Pinned};
use super::{Buffer, DType, Device};
use crate::error::{Error, Result};

/// Where the bytes of a buffer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// Memory of the device that computes.
    #[default]
    Memory,
    /// A nameless file on disk, whose pages are in memory only while they are used.
    Disk,
    /// Pinned memory of the host, which a device with memory of its own reads and writes by itself; the same as
    /// [`Placement::Memory`] on a device that shares the host's memory.
    Host,
}

impl Placement {
    /// Whether a buffer here was moved out of the planned memory.
    pub fn is_away(self) -> bool {
        self != Self::Memory
    }

    /// Its name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "device",
            Self::Disk => "file",
            Self::Host => "host",
        }
    }
}

/// Zeroed memory that one arena's buffers are cut from.
pub enum Chunk {
    /// Memory of the host, or a mapped file.
    Host(HostPages),
    /// Memory of a device.
    #[cfg(feature = "cuda")]
    Cuda(Memory),
    /// Pinned memory of the host, at addresses that a device uses as its own.
    #[cfg(feature = "cuda")]
    Pinned(Pinned),
}

/// Pages of the host's memory, or of a mapped file.
pub struct HostPages {
    pages: memmap2::MmapMut,
    place: Placement,
}

static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Bytes that arenas reserve of the host's memory now, touched or not. They do not pass through the allocator.
pub fn mapped() -> usize {
    MAPPED.load(Relaxed)
}

impl Drop for HostPages {
    fn drop(&mut self) {
        if self.place != Placement::Disk {
            MAPPED.fetch_sub(self.pages.len(), Relaxed);
        }
    }
}

impl HostPages {
    fn new(pages: memmap2::MmapMut, place: Placement) -> Self {
        if place != Placement::Disk {
            MAPPED.fetch_add(pages.len(), Relaxed);
        }
        Self { pages, place }
    }
}

impl Chunk {
    /// All bytes of a chunk in host memory; none of a device's. [`Buffer`] makes sure that writers hold disjoint
    /// parts.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Host(host) => &host.pages,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::Pinned(_) => &[],
        }
    }

    /// The mapping of a chunk in a file: its pages may be released, and come back with the same bytes.
    pub(crate) fn of_file(&self) -> Option<&memmap2::MmapMut> {
        match self {
            Self::Host(host) => (host.place == Placement::Disk).then_some(&host.pages),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) | Self::Pinned(_) => None,
        }
    }

    /// The device that uses its addresses.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Host(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => Device::Cuda(memory.gpu()),
            #[cfg(feature = "cuda")]
            Self::Pinned(pinned) => Device::Cuda(pinned.gpu()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Host(host) => host.pages.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => memory.len(),
            #[cfg(feature = "cuda")]
            Self::Pinned(pinned) => pinned.len(),
        }
    }

    /// The address of byte `start`.
    fn at(&self, start: usize) -> *mut u8 {
        match self {
            Self::Host(host) => host.pages.as_ptr().wrapping_add(start).cast_mut(),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => std::ptr::without_provenance_mut(memory.address() as usize + start),
            #[cfg(feature = "cuda")]
            Self::Pinned(pinned) => pinned.head().wrapping_add(start),
        }
    }
}

/// One line of a memory table: a buffer as its arena cut it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    /// The arena: saved, workspace, gradients ...
    pub role: &'static str,
    /// Name of the buffer, by its content.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Its shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Memory or file that it was cut from.
    pub place: Placement,
}

impl TableRow {
    /// Bytes of the buffer, with the padding that aligns the next one.
    pub fn bytes(&self) -> usize {
        (self.shape.iter().product::<usize>() * self.dtype.size()).next_multiple_of(ALIGN)
    }
}

/// Every buffer starts on a cache line, which is also enough for AVX-512 loads.
pub const ALIGN: usize = 64;

/// Bytes of a page: in a file every buffer starts on one, so that it can be fetched and released alone.
const PAGE: usize = 4096;

/// Memory of one role, cut front to back and freed as a whole.
pub struct Arena {
    role: &'static str,
    place: Placement,
    chunk: Option<Arc<Chunk>>,
    used: usize,
    rows: Vec<TableRow>,
}

impl Arena {
    fn planning(role: &'static str, place: Placement) -> Self {
        Self { role, place, chunk: None, used: 0, rows: Vec::new() }
    }

    fn sized(
        role: &'static str,
        place: Placement,
        bytes: usize,
        spool: Option<&Path>,
        device: Device,
    ) -> Result<Self> {
        let chunk = match (place, spool, device) {
            (Placement::Disk, Some(folder), Device::Cpu) => {
                Chunk::Host(HostPages::new(in_file(role, bytes.max(1), folder)?, place))
            }
            (Placement::Memory | Placement::Host, _, Device::Cpu) => {
                Chunk::Host(HostPages::new(in_memory(role, bytes.max(1))?, place))
            }
            #[cfg(feature = "cuda")]
            (Placement::Memory, _, Device::Cuda(gpu)) => Chunk::Cuda(Memory::zeroed(gpu, bytes, role)?),
            #[cfg(feature = "cuda")]
            (Placement::Host, _, Device::Cuda(gpu)) => Chunk::Pinned(Pinned::zeroed(gpu, bytes, role)?),
            (Placement::Disk, ..) => {
                return Err(Error::failed(format!("{role} has no folder to be kept in; please report this")));
            }
        };
        Ok(Self { role, place, chunk: Some(Arc::new(chunk)), used: 0, rows: Vec::new() })
    }

    /// Bytes cut so far, alignment included.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Cuts the next buffer.
    ///
    /// # Errors
    /// When the arena is exhausted: its plan and its use disagree.
    pub fn take(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize]) -> Result<Buffer> {
        let len = shape.iter().product::<usize>();
        let start = match self.place {
            Placement::Memory | Placement::Host => self.used,
            Placement::Disk => self.used.next_multiple_of(PAGE),
        };
        let end = start + (len * dtype.size()).next_multiple_of(ALIGN);
        let row =
            TableRow { role: self.role, name: name.into(), dtype, shape: shape.to_vec(), place: self.place };
        let head = match &self.chunk {
            None => NonNull::dangling(),
            // No other buffer gets this range.
            Some(chunk) if end <= chunk.len().next_multiple_of(ALIGN) => {
                NonNull::new(chunk.at(start)).unwrap_or(NonNull::dangling())
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

/// `bytes` zeros in large pages, as far as the system gives them.
pub(crate) fn in_memory(role: &str, bytes: usize) -> Result<memmap2::MmapMut> {
    let pages = memmap2::MmapMut::map_anon(bytes).map_err(|cause| {
        Error::memory(format!(
            "{bytes} bytes for {role} cannot be reserved: {cause}; use fewer or shorter rows at a time, or a smaller adapter"
        ))
    })?;
    // With small pages every row of activations has a page of its own, more than a TLB holds: 2% of a training step.
    // Refused advice costs no more.
    #[cfg(target_os = "linux")]
    let _ = pages.advise(memmap2::Advice::HugePage);
    Ok(pages)
}

/// A mapping of `bytes` zeros of a nameless file in `folder`. The zeros are written, so that a full disk is an error
/// here, and not a signal when a page is touched.
fn in_file(role: &str, bytes: usize, folder: &Path) -> Result<memmap2::MmapMut> {
    let failed = |cause: std::io::Error| {
        Error::failed(format!(
            "{}: {bytes} bytes for {role} cannot be written: {cause}; {}, or leave the offloading out",
            folder.display(),
            engraft_util::atomic::remedy(&cause)
        ))
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let mut file = tempfile::tempfile_in(folder).map_err(failed)?;
    fill(&mut file, bytes).map_err(failed)?;
    // SAFETY: the file has no name, so nobody else can shorten or write it; its content is plain numbers.
    unsafe { memmap2::MmapMut::map_mut(&file) }.map_err(failed)
}

fn fill(file: &mut File, bytes: usize) -> std::io::Result<()> {
    let zeros = vec![0u8; bytes.min(1 << 20)];
    let mut left = bytes;
    while left > 0 {
        let count = left.min(zeros.len());
        file.write_all(&zeros[..count])?;
        left -= count;
    }
    Ok(())
}

/// All arenas of a run, or the plan of them.
pub struct Arenas {
    real: bool,
    spool: Option<PathBuf>,
    device: Device,
    rows: Vec<TableRow>,
}

impl Arenas {
    /// Arenas that only count: their buffers have no memory.
    pub fn planning() -> Self {
        Self { real: false, spool: None, device: Device::Cpu, rows: Vec::new() }
    }

    /// Arenas of zeroed memory, whose pages are touched at first use; files are made in `spool`.
    pub fn real(spool: Option<PathBuf>) -> Self {
        Self { real: true, spool, device: Device::Cpu, rows: Vec::new() }
    }

    /// The same in the memory of `device`.
    pub fn on(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// The device whose memory they cut.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Runs `cut` against an arena that counts and then, unless planning, against one of exactly that size.
    ///
    /// # Errors
    /// When memory cannot be reserved or the file cannot be written.
    pub fn build<T>(
        &mut self,
        role: &'static str,
        place: Placement,
        mut cut: impl FnMut(&mut Arena) -> Result<T>,
    ) -> Result<T> {
        let mut arena = Arena::planning(role, place);
        let mut built = cut(&mut arena)?;
        if self.real {
            arena = Arena::sized(role, place, arena.used, self.spool.as_deref(), self.device)?;
            built = cut(&mut arena)?;
        }
        self.rows.extend(arena.rows);
        Ok(built)
    }

    /// Whether they hold memory and not only count it.
    pub fn are_real(&self) -> bool {
        self.real
    }

    /// One row for each buffer cut so far.
    pub fn rows(&self) -> &[TableRow] {
        &self.rows
    }

    /// One row for each buffer that was cut.
    pub fn into_rows(self) -> Vec<TableRow> {
        self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(arena: &mut Arena) -> Result<(Buffer, Buffer)> {
        Ok((arena.take("x", DType::F32, &[3, 5])?, arena.take("ids", DType::U32, &[7])?))
    }

    #[test]
    fn a_plan_and_its_arena_agree() {
        let mut plan = Arenas::planning();
        plan.build("workspace", Placement::Memory, cut).unwrap();
        let mut real = Arenas::real(None);
        let (mut x, ids) = real.build("workspace", Placement::Memory, cut).unwrap();
        assert_eq!(plan.rows(), real.rows());
        assert_eq!(real.rows().iter().map(TableRow::bytes).sum::<usize>(), 64 + 64);
        x.view_mut().host::<f32>()[14] = 1.5;
        assert_eq!(x.view().slice(14, 1).host::<f32>(), [1.5]);
        assert_eq!(ids.view().host::<u32>(), [0; 7]);
    }

    #[test]
    fn an_exhausted_arena_refuses() {
        let mut arena = Arena::sized("saved", Placement::Memory, 64, None, Device::Cpu).unwrap();
        arena.take("a", DType::F32, &[16]).unwrap();
        assert!(arena.take("b", DType::F32, &[1]).is_err());
    }

    #[test]
    fn a_file_arena_keeps_what_is_released() {
        let folder = tempfile::tempdir().unwrap();
        let mut arenas = Arenas::real(Some(folder.path().to_owned()));
        let (mut x, mut ids) = arenas.build("saved", Placement::Disk, cut).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
        x.view_mut().host::<f32>().fill(2.5);
        ids.view_mut().host::<u32>().fill(9);
        x.region().unwrap().release();
        x.region().unwrap().fetch();
        assert_eq!(x.view().host::<f32>(), [2.5; 15]);
        assert_eq!(ids.view().host::<u32>(), [9; 7]);
        std::fs::write(folder.path().join("file"), "").unwrap();
        let gone = Arenas::real(Some(folder.path().join("file"))).build("saved", Placement::Disk, cut);
        assert!(gone.unwrap_err().to_string().contains("bytes for saved"));
    }
}
