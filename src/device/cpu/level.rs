//! The instruction level of CPU kernels: found once, the same for the whole process.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Runs `body` compiled for the widest vectors of this CPU.
#[inline(always)]
pub fn vectorised<R>(body: impl FnOnce() -> R) -> R {
    // Finding the level costs two atomic loads.
    pulp::Arch::new().dispatch(body)
}

/// Instructions that hand-written kernels use; of two that a CPU has, the later one is faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Plain loops, vectorised by the compiler and `gemm`.
    Plain = 1,
    /// NEON, which all 64-bit ARM CPUs have.
    Neon = 2,
    /// AVX2, FMA and F16C.
    Avx2 = 3,
    /// AVX-512 F.
    Avx512 = 4,
}

impl Level {
    /// All levels, the lowest first.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Neon, Self::Avx2, Self::Avx512];

    /// Whether this program has such kernels and this CPU the instructions.
    pub fn is_there(self) -> bool {
        match self {
            Self::Plain => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => cfg!(feature = "avx512") && is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// The best level of this CPU, unless [`limit_level`] set a lower one.
pub fn level() -> Level {
    match LEVEL.load(Relaxed) {
        1 => Level::Plain,
        2 => Level::Neon,
        3 => Level::Avx2,
        4 => Level::Avx512,
        _ => limit_level(most()),
    }
}

#[cfg(not(test))]
fn most() -> Level {
    Level::Avx512
}

#[cfg(test)]
use tests::most;

/// Whether there are hand-written kernels for this CPU.
pub fn vectors() -> bool {
    level() != Level::Plain
}

static BF16: AtomicU8 = AtomicU8::new(0);

/// Whether products of BF16 pairs exist and are faster than FP32: AVX-512 BF16 on AMD CPUs, which multiply a vector of
/// 16 pairs in about the time of one FMA. Intel CPUs take the time of four FMAs (measured on a fifth-generation Xeon:
/// 1.35 against 5.4 G/s), which is half the operations a second of F32.
pub fn bf16() -> bool {
    let known = match BF16.load(Relaxed) {
        0 => {
            let found = best_bf16() || insisted();
            BF16.store(1 + u8::from(found), Relaxed);
            found
        }
        known => known == 2,
    };
    known && level() == Level::Avx512
}

#[cfg(target_arch = "x86_64")]
fn best_bf16() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let amd = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    amd && reports_bf16()
}

#[cfg(not(target_arch = "x86_64"))]
fn best_bf16() -> bool {
    false
}

/// Whether this CPU reports the instructions of AVX-512 BF16, fast or not. Some have them and do not report them.
pub fn reports_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(not(test))]
fn insisted() -> bool {
    false
}

#[cfg(test)]
use tests::insisted;

/// Makes [`bf16`] true on any CPU with AVX-512, even if the CPU does not report it. For tests and measurements.
///
/// # Safety
/// The CPU executes the instructions of AVX-512 BF16; one that does not ends the process.
pub unsafe fn force_bf16() {
    BF16.store(2, Relaxed);
}

/// Limits the level to `most` from now on and returns the one in use. For tests and measurements: results depend on
/// it.
pub fn limit_level(most: Level) -> Level {
    let level = Level::ALL.into_iter().filter(|&level| level <= most && level.is_there()).max();
    let level = level.unwrap_or(Level::Plain);
    LEVEL.store(level as u8, Relaxed);
    level
}

/// The vector level in use, part of what results depend on: `x86-v4` (AVX-512), `x86-v3` (AVX2),
/// `baseline` ...
pub fn dispatch_level() -> &'static str {
    struct Level;
    impl pulp::WithSimd for Level {
        type Output = &'static str;
        fn with_simd<S: pulp::Simd>(self, _: S) -> &'static str {
            match (std::any::type_name::<S>(), S::F32_LANES) {
                (_, 16) => "x86-v4",
                (_, 8) => "x86-v3",
                (_, 4) => "128-bit",
                _ => "scalar",
            }
        }
    }
    pulp::Arch::new().dispatch(Level)
}

#[cfg(test)]
mod tests {
    use std::{env, process::Command};

    use super::*;
    use crate::testing::skip;

    const LEVEL: &str = "ENGRAFT_TEST_LEVEL";

    /// The best level that this run of the tests may use.
    pub(super) fn most() -> Level {
        let wanted = env::var(LEVEL).ok();
        let level = Level::ALL.into_iter().find(|level| wanted == Some(format!("{level:?}")));
        level.unwrap_or(Level::Avx512)
    }

    const PAIRS: &str = "Bf16";

    /// Whether this run of the tests uses BF16 products even if the CPU does not report them.
    pub(super) fn insisted() -> bool {
        env::var(LEVEL).is_ok_and(|wanted| wanted == PAIRS)
    }

    /// CPUs may execute the instructions without reporting them, or slowly; their kernels are tested all the same. A
    /// CPU that lacks them ends the process.
    #[test]
    #[cfg(all(unix, target_arch = "x86_64"))]
    fn kernels_of_bf16_are_right_where_they_are_not_used() {
        use std::os::unix::process::ExitStatusExt;
        const UNKNOWN_INSTRUCTION: i32 = 4;
        if env::var_os(LEVEL).is_some() {
            return; // the process that set it runs this test
        }
        if level() != Level::Avx512 {
            let why = "BF16 products need AVX-512, of the CPU and as a feature of this build";
            return skip(why, reports_bf16());
        }
        let mut tests = Command::new(env::current_exe().unwrap());
        let output = tests.arg("bf16").env(LEVEL, PAIRS).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        if output.status.signal() == Some(UNKNOWN_INSTRUCTION) {
            return skip("this CPU has no BF16 products", reports_bf16());
        }
        assert!(output.status.success() && text.contains("test result: ok"), "{text}");
        assert!(!text.contains("running 0 tests"), "{text}");
    }

    /// The level is one for the whole process, so the kernels' tests run again in others.
    #[test]
    fn kernels_are_right_at_lower_levels_too() {
        if env::var_os(LEVEL).is_some() {
            return; // this process is one of them
        }
        let mut lowers =
            Level::ALL.into_iter().filter(|&lower| lower < level() && lower.is_there()).peekable();
        if lowers.peek().is_none() {
            skip("no lower level than the one in use", false);
        }
        for lower in lowers {
            let mut tests = Command::new(env::current_exe().unwrap());
            let output = tests.arg("kernels::").env(LEVEL, format!("{lower:?}")).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("test result: ok"), "{lower:?}: {text}");
            assert!(!text.contains("running 0 tests"), "{text}");
        }
    }
}
