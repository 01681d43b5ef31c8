//! Tests of what the machine has: sample files of both forms of control groups, and this process.

use super::*;

const STATUS: &str = "Name:\tengraft\nVmPeak:\t  9000 kB\nVmSize:\t    8000 kB\nVmHWM:\t    2200 kB\nVmRSS:\t    \
                      2000 kB\nRssAnon:\t     700 kB\nRssFile:\t    1200 kB\nRssShmem:\t     100 kB\nVmData:\t     900 kB\n";
const UNLIMITED: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
                         Max data size             unlimited            unlimited            bytes     \n\
                         Max address space         unlimited            unlimited            bytes     \n";
const V1_MOUNT: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
                        41 31 0:38 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n";
const V2_MOUNT: &str = "26 23 0:23 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

/// A root folder with 1000 kB available of 4000 kB, and the given files.
fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
    let folder = tempfile::tempdir().unwrap();
    let meminfo = "MemTotal:        4000 kB\nMemFree:          200 kB\nMemAvailable:    1000 kB\n";
    let fixed = [("proc/meminfo", meminfo), ("proc/self/status", STATUS)];
    for (path, text) in fixed.iter().chain(files) {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let system = System::new(folder.path());
    (folder, system)
}

#[test]
fn without_groups_the_machine_decides() {
    let (_folder, machine) = system(&[("proc/self/limits", UNLIMITED)]);
    assert_eq!((machine.available(), machine.limit()), (Some(1000 << 10), Some(4000 << 10)));
}

#[test]
fn without_proc_nothing_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let machine = System::new(folder.path());
    assert_eq!((machine.available(), machine.limit()), (None, None));
}

#[test]
fn version_1_counts_its_file_cache_as_free() {
    let group = "sys/fs/cgroup/memory/box/inner";
    let (_folder, machine) = system(&[
        ("proc/self/cgroup", "4:memory:/box/inner\n1:cpu,cpuacct:/other\n0::/\n"),
        ("proc/self/mountinfo", V1_MOUNT),
        (&format!("{group}/memory.limit_in_bytes"), "900000\n"),
        (&format!("{group}/memory.usage_in_bytes"), "800000\n"),
        (
            &format!("{group}/memory.stat"),
            "cache 9\ninactive_file 1\nactive_file 2\ntotal_inactive_file 500000\ntotal_active_file 100000\n",
        ),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n"),
    ]);
    assert_eq!(machine.groups(), [Group { limit: 900_000, used: 200_000 }]);
    assert_eq!((machine.available(), machine.limit()), (Some(700_000), Some(900_000)));
}

#[test]
fn version_2_takes_the_tightest_of_the_nested_groups() {
    let at = |folder: &str, name: &str| format!("sys/fs/cgroup/{folder}{name}");
    let (_folder, machine) = system(&[
        ("proc/self/cgroup", "0::/user.slice/run.scope\n"),
        ("proc/self/mountinfo", V2_MOUNT),
        (&at("user.slice/run.scope/", "memory.max"), "max\n"),
        (&at("user.slice/run.scope/", "memory.high"), "max\n"),
        (&at("user.slice/run.scope/", "memory.current"), "10000\n"),
        (&at("user.slice/", "memory.max"), "600000\n"),
        (&at("user.slice/", "memory.high"), "500000\n"),
        (&at("user.slice/", "memory.current"), "450000\n"),
        (
            &at("user.slice/", "memory.stat"),
            "anon 7\ninactive_file 100\nactive_file 20\nslab_reclaimable 3\n",
        ),
    ]);
    assert_eq!(machine.groups(), [Group { limit: 500_000, used: 449_877 }]);
    assert_eq!((machine.available(), machine.limit()), (Some(50_123), Some(500_000)));
}

#[test]
fn a_container_sees_its_own_group_at_the_mount() {
    let mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let limits = [
        ("proc/self/mountinfo", mount),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "6000\n"),
    ];
    for own in ["2:memory:/docker/abc\n", "2:memory:/\n", "2:memory:/../elsewhere\n"] {
        let (_folder, machine) = system(&[&limits[..], &[("proc/self/cgroup", own)]].concat());
        assert_eq!((machine.available(), machine.limit()), (Some(0), Some(5000)), "{own}");
    }
}

#[test]
fn limits_of_the_process_count() {
    let limits = UNLIMITED.replacen("unlimited", "1000000  ", 1);
    let (_folder, machine) = system(&[("proc/self/limits", &limits)]);
    assert_eq!((machine.available(), machine.limit()), (Some(1_000_000 - (900 << 10)), Some(1_000_000)));
    assert_eq!(soft_limit(&limits, "Max address space"), None);
}

#[test]
fn resident_is_read_from_the_status() {
    let expected = Resident { total: 2000 << 10, anonymous: 700 << 10, file: 1300 << 10, peak: 2200 << 10 };
    assert_eq!(parse_resident(STATUS), Some(expected));
    assert_eq!(parse_resident("VmRSS:\t 1 kB\n"), None);
    assert_eq!(kilobytes("VmRSS:\t many kB\n", "VmRSS"), None);
    assert_eq!(kilobytes("VmRSSx:\t 1 kB\n", "VmRSS"), None);
}

#[cfg(target_os = "linux")]
#[test]
fn touched_memory_becomes_resident() {
    const BYTES: usize = 64 << 20;
    // Other tests of this process come and go, so a measurement may be disturbed, but not each time.
    let grown = (0..5).map(|_| {
        let before = resident().unwrap();
        let memory = std::hint::black_box(vec![1u8; BYTES]);
        let after = resident().unwrap();
        drop(memory);
        assert!(after.peak >= after.total && after.total >= after.anonymous);
        after.anonymous.saturating_sub(before.anonymous)
    });
    let grown: Vec<_> = grown.collect();
    assert!(grown.iter().any(|bytes| bytes.abs_diff(BYTES as u64) < 8 << 20), "{grown:?}");
    let (available, limit) = (available().unwrap(), limit().unwrap());
    assert!(available > 0 && available <= limit, "{available} of {limit}");
}
