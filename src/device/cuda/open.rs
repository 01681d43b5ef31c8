//! Opening a device: everything that a run would miss later is looked for now, before a base is loaded.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicUsize},
};

use cudarc::{
    cublaslt,
    driver::{
        CudaContext, CudaStream, DriverError,
        sys::{self, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CUresult},
    },
};

use super::{Gpu, Image, blas, image};
use crate::{
    device::cuda_requirements::{refused_capability, refused_driver},
    error::{Error, Result},
};

/// Code that is loaded to see whether the device takes it.
static PROBE: Image = image!("elementwise");

fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: it writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

/// A device that was opened, with what its [`Gpu`] is made of.
struct Parts {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    products: blas::Products,
    /// Address of [`PROBE`], loaded.
    probe: usize,
    most_shared: usize,
}

impl Gpu {
    /// Whether the driver's library is here and does not answer that there is no device: an error of another kind
    /// counts as a device, so that its reason is shown.
    pub fn seems_present() -> bool {
        // SAFETY: looks for the driver's library, no more.
        if !unsafe { sys::is_culib_present() } {
            return false;
        }
        match CudaContext::device_count() {
            Ok(count) => count > 0,
            Err(DriverError(cause)) => cause != CUresult::CUDA_ERROR_NO_DEVICE,
        }
    }

    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub(super) fn new(ordinal: usize) -> Result<Self> {
        let refuse = |why: String| Error::input(format!("--device cuda:{ordinal}: {why}"));
        let Parts { context, stream, products, probe, most_shared } = open(ordinal).map_err(refuse)?;
        Ok(Self {
            ordinal,
            context,
            stream,
            kernels: Mutex::default(),
            images: Mutex::new([(PROBE.op, probe)].into()),
            allowed: Mutex::default(),
            most_shared,
            waits: AtomicBool::new(false),
            apart: AtomicBool::new(false),
            launches: AtomicUsize::new(0),
            products,
            failure: Mutex::default(),
            held: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            scratch: Mutex::default(),
            control: Mutex::default(),
            tables: Mutex::default(),
            spare: Mutex::default(),
        })
    }
}

/// Opens a device, or says why it cannot be used.
fn open(ordinal: usize) -> Result<Parts, String> {
    // SAFETY: looks for the driver's library, no more.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver is installed here; install one, or give --device cpu".into());
    }
    let failed = |cause: DriverError| format!("the CUDA driver answers {cause}; give --device cpu");
    let count = CudaContext::device_count().map_err(failed)?;
    if ordinal as i64 >= i64::from(count) {
        return Err(match count {
            0 => "there is no CUDA device here; give --device cpu".to_owned(),
            1 => "there is one CUDA device here; give --device cuda:0".to_owned(),
            count => {
                format!("there are {count} CUDA devices here; give --device cuda:0 to cuda:{}", count - 1)
            }
        });
    }
    if let Some(why) = refused_driver(driver_version().map_err(failed)?) {
        return Err(why);
    }
    // SAFETY: looks for the library, no more.
    if !unsafe { cublaslt::sys::is_culib_present() } {
        return Err(
            "the library libcublasLt.so.13 is not found; add its folder to LD_LIBRARY_PATH (with PyTorch that is site-packages/nvidia/cu13/lib), or give --device cpu"
                .into(),
        );
    }
    let context = CudaContext::new(ordinal).map_err(failed)?;
    let capability = context.compute_capability().map_err(failed)?;
    if let Some(why) = refused_capability(capability) {
        return Err(why);
    }
    let probe = PROBE.load().map_err(|cause| {
        format!(
            "its driver does not load the kernels: {cause}; build the program with nvcc 13.0 (scripts/cuda-toolchain.sh), or give --device cpu"
        )
    })?;
    let most_shared =
        context.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN).map_err(failed)?;
    let stream = context.new_stream().map_err(failed)?;
    let products = blas::Products::new().map_err(|cause| {
        format!("cublasLt answers {cause}; install one for CUDA 13, or give --device cpu")
    })?;
    Ok(Parts { context, stream, products, probe, most_shared: most_shared.max(0) as usize })
}
