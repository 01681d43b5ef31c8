//! Memory of the machine for this process, and its resident part: `/proc` and control groups of Linux.
//!
//! Elsewhere every answer is `None`. A process may take the least of what the machine, each control group
//! around it (versions 1 and 2) and its own resource limits leave.

use std::{
    fs,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use serde::{Deserialize, Serialize};

/// The part of a machine that results depend on: runs on machines that differ here differ in bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Kind of device, such as `cpu`.
    pub device: String,
    /// Type of activations, such as `f32`.
    pub precision: String,
    /// Instruction level of a CPU or architecture of another device.
    pub dispatch: String,
}

/// Resident bytes of this process, as the kernel counts them (`/proc/self/status`).
///
/// Kernels sum these counters over CPUs lazily, so each may be off by some hundred KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resident {
    /// All resident bytes (`VmRSS`).
    pub total: u64,
    /// Bytes of heap, stacks and arenas (`RssAnon`).
    pub anonymous: u64,
    /// Bytes of mapped files, such as program and base weights, whose pages the kernel may drop (`RssFile`, `RssShmem`).
    pub file: u64,
    /// Largest `total` since the process began (`VmHWM`).
    pub peak: u64,
}

/// Bytes the process can still take before it swaps, fails or is killed.
pub fn available() -> Option<u64> {
    System::new("/").available()
}

/// Bytes the process could use if it were alone: the machine's memory or a smaller limit.
pub fn limit() -> Option<u64> {
    System::new("/").limit()
}

/// Resident memory of this process now.
pub fn resident() -> Option<Resident> {
    parse_resident(&fs::read_to_string("/proc/self/status").ok()?)
}

/// The files below a root folder: `/`, or a test's copy of them.
struct System {
    root: PathBuf,
}

/// The grant of one control group, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Group {
    limit: u64,
    /// Bytes in use, without file cache that the kernel can drop.
    used: u64,
}

/// The two forms of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A mounted hierarchy of control groups.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    version: Version,
    /// The group that shows at `point`.
    root: &'a str,
    point: &'a str,
}

impl System {
    fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }

    fn available(&self) -> Option<u64> {
        let machine = self.read("proc/meminfo").and_then(|text| kilobytes(&text, "MemAvailable"));
        let groups = self.groups().into_iter().map(|group| group.limit.saturating_sub(group.used));
        let own = self.own_limits().into_iter().map(|(limit, used)| limit.saturating_sub(used));
        machine.into_iter().chain(groups).chain(own).min()
    }

    fn limit(&self) -> Option<u64> {
        let machine = self.read("proc/meminfo").and_then(|text| kilobytes(&text, "MemTotal"));
        let groups = self.groups().into_iter().map(|group| group.limit);
        let own = self.own_limits().into_iter().map(|(limit, _)| limit);
        machine.into_iter().chain(groups).chain(own).min()
    }

    /// Limits of address space and data (`ulimit -v`, `ulimit -d`), each with what is in use of it.
    fn own_limits(&self) -> Vec<(u64, u64)> {
        let (Some(limits), Some(status)) = (self.read("proc/self/limits"), self.read("proc/self/status"))
        else {
            return Vec::new();
        };
        [("Max address space", "VmSize"), ("Max data size", "VmData")]
            .into_iter()
            .filter_map(|(name, used)| {
                Some((soft_limit(&limits, name)?, kilobytes(&status, used).unwrap_or(0)))
            })
            .collect()
    }

    /// Every control group around the process that limits memory, innermost first.
    fn groups(&self) -> Vec<Group> {
        let (Some(own), Some(mounts)) = (self.read("proc/self/cgroup"), self.read("proc/self/mountinfo"))
        else {
            return Vec::new();
        };
        let mut groups = Vec::new();
        for mount in mounts.lines().filter_map(parse_mount) {
            let Some(path) = own_group(&own, mount.version) else { continue };
            let top = self.root.join(mount.point.trim_start_matches('/'));
            let inside = Path::new(path).strip_prefix(mount.root).unwrap_or(Path::new(""));
            // Inside a container the path may name folders that its mount does not show; `..` leads outside.
            let inside = if path.contains("..") { Path::new("") } else { inside };
            for relative in inside.ancestors() {
                groups.extend(read_group(&top.join(relative), mount.version));
            }
        }
        groups
    }
}

/// The group in a folder, if it limits memory.
fn read_group(folder: &Path, version: Version) -> Option<Group> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name).and_then(|text| parse_limit(&text));
    let (limit, usage) = match version {
        Version::V1 => (number("memory.limit_in_bytes"), number("memory.usage_in_bytes")),
        // Above `high` the kernel slows the process down to a crawl, so that is a limit as well.
        Version::V2 => {
            let limits = [number("memory.max"), number("memory.high")];
            (limits.into_iter().flatten().min(), number("memory.current"))
        }
    };
    let reclaimable = read("memory.stat").map_or(0, |text| reclaimable(&text));
    Some(Group { limit: limit?, used: usage.unwrap_or(0).saturating_sub(reclaimable) })
}

/// `12345`, or `None` for `max` and for the huge number that version 1 writes instead of it.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes: &u64| bytes < 1 << 60)
}

/// File cache and kernel objects that can be dropped, in bytes; version 1 names sums over subgroups `total_`.
fn reclaimable(stat: &str) -> u64 {
    let value = |wanted: &str| {
        let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
        fields.find(|(name, _)| *name == wanted).and_then(|(_, value)| value.trim().parse::<u64>().ok())
    };
    let file = ["inactive_file", "active_file"];
    let file = file.map(|name| value(&format!("total_{name}")).or_else(|| value(name)).unwrap_or(0));
    file.iter().sum::<u64>() + value("slab_reclaimable").unwrap_or(0)
}

/// The process's group in the hierarchy of memory, from lines `id:controllers:path`.
fn own_group(text: &str, version: Version) -> Option<&str> {
    text.lines().find_map(|line| {
        let (id, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let found = match version {
            Version::V1 => controllers.split(',').any(|name| name == "memory"),
            Version::V2 => id == "0" && controllers.is_empty(),
        };
        found.then_some(path)
    })
}

/// A line of `mountinfo`, if it mounts control groups of memory: proc_pid_mountinfo(5).
fn parse_mount(line: &str) -> Option<Mount<'_>> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let version = match (kind.next()?, kind.nth(1).unwrap_or("")) {
        ("cgroup2", _) => Version::V2,
        ("cgroup", options) if options.split(',').any(|option| option == "memory") => Version::V1,
        _ => return None,
    };
    Some(Mount { version, root, point })
}

/// Bytes of a line `name:   123 kB`.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let value = line.strip_prefix(name)?.strip_prefix(':')?.trim().strip_suffix("kB")?;
        value.trim().parse::<u64>().ok()?.checked_mul(1024)
    })
}

/// The soft limit of a line `name   soft   hard   bytes`; `None` where it is unlimited.
fn soft_limit(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next().and_then(parse_limit)
}

fn parse_resident(status: &str) -> Option<Resident> {
    let bytes = |name: &str| kilobytes(status, name);
    Some(Resident {
        total: bytes("VmRSS")?,
        anonymous: bytes("RssAnon")?,
        file: bytes("RssFile")? + bytes("RssShmem").unwrap_or(0),
        peak: bytes("VmHWM")?,
    })
}

/// The program as it was built: its version, and on Linux the length and the time of its file.
pub fn program() -> String {
    let file = fs::metadata("/proc/self/exe");
    let stamp = file.ok().and_then(|file| {
        let changed = file.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(format!(", {} bytes of {}", file.len(), changed.as_secs()))
    });
    format!("{}{}", env!("CARGO_PKG_VERSION"), stamp.unwrap_or_default())
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
