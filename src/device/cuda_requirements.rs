//! The driver and the device that the CUDA kernels need, and the sentences for others.

/// Oldest devices that the kernels are compiled for, as major and minor capability.
const OLDEST: (i32, i32) = (8, 0);

/// Oldest driver, as it tells its version: that of the compiler and of cuBLASLt, whose code an older one does not load.
const OLDEST_DRIVER: i32 = 13_000;

/// The sentence for a driver that is too old, as [`OLDEST_DRIVER`].
pub fn refused_driver(version: i32) -> Option<String> {
    let name = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    (version < OLDEST_DRIVER).then(|| {
        format!(
            "its driver is for CUDA {} and the kernels need one for CUDA {}, 580 or later; update the driver, or give --device cpu",
            name(version),
            name(OLDEST_DRIVER)
        )
    })
}

/// The sentence for a device that is too old, as [`OLDEST`].
pub fn refused_capability(capability: (i32, i32)) -> Option<String> {
    (capability < OLDEST).then(|| {
        format!(
            "its compute capability is {}.{} and the kernels need {}.{}; take a newer device, or give --device cpu",
            capability.0, capability.1, OLDEST.0, OLDEST.1
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_and_an_old_device_are_refused_with_a_remedy() {
        assert_eq!(refused_driver(13_000), None);
        assert_eq!(refused_driver(13_010), None);
        let why = refused_driver(12_040).unwrap();
        assert!(why.contains("CUDA 12.4") && why.contains("CUDA 13.0, 580 or later; update"), "{why}");
        assert_eq!(refused_capability((8, 0)), None);
        assert!(refused_capability((7, 5)).unwrap().contains("7.5 and the kernels need 8.0; take a newer"));
    }
}
