//! cuBLASLt: matrix products by description. For each description an algorithm is chosen once.

use std::{collections::HashMap, ffi::c_void, mem::size_of, ptr::from_ref, sync::Mutex};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{
        self, cublasComputeType_t::CUBLAS_COMPUTE_32F, cublasLtEpilogue_t,
        cublasLtMatmulDescAttributes_t as DescAttribute,
        cublasLtMatmulPreferenceAttributes_t as PrefAttribute,
    },
};

use super::{Gpu, Memory, lock};
use crate::device::{
    DType,
    gemm_layout::{GemmLayout, Operand, alignment},
    kinds::CUDA_WORKSPACE,
};

/// The last step of a product, on its FP32 sums `z = alpha op(A) op(B) + beta C + bias`. GELU is that of tanh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// `D = z`.
    None,
    /// `D = gelu(z)`, and z itself, rounded, in the other matrix.
    Gelu(SideMatrix),
    /// `D = z gelu'(x)` with x in the other matrix.
    GeluGradient(SideMatrix),
}

/// A matrix of D's sizes and type that an epilogue reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideMatrix {
    /// Address of its first element.
    pub address: u64,
    /// Elements from a column to the next.
    pub ld: usize,
}

impl SideMatrix {
    /// 16-bit elements, columns at multiples of 8 of them, 16-byte alignment (manual of
    /// cuBLASLt 13, `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD` and `.._POINTER`).
    fn is_taken(self, dtype: DType) -> bool {
        dtype.size() == 2 && self.ld.is_multiple_of(8) && self.address.is_multiple_of(16)
    }
}

impl Epilogue {
    /// Whether cuBLASLt takes its side matrix beside a D of `dtype`.
    pub fn is_taken(self, dtype: DType) -> bool {
        self.side().is_none_or(|side| side.is_taken(dtype))
    }

    fn side(self) -> Option<SideMatrix> {
        match self {
            Self::None => None,
            Self::Gelu(side) | Self::GeluGradient(side) => Some(side),
        }
    }

    /// cuBLASLt's name of it, beside a bias or without.
    fn name(self, bias: bool) -> cublasLtEpilogue_t {
        match (self, bias) {
            (Self::None, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (Self::None, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (Self::Gelu(_), false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX,
            (Self::Gelu(_), true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            // It has no place for a bias, and nothing asks for one.
            (Self::GeluGradient(_), _) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
        }
    }
}

/// A product `D = alpha op(A) op(B) + beta C`, perhaps with a bias and an epilogue. Sums are FP32; FP32 factors are
/// multiplied in full FP32, never TF32.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Sizes, types and layouts of the operands.
    pub product: GemmLayout,
    /// Address of A on the device.
    pub a: u64,
    /// Address of B on the device.
    pub b: u64,
    /// Type of A and B.
    pub factors: DType,
    /// Factor of the product of A and B.
    pub alpha: f32,
    /// Address of C, laid out and typed as D; not read where `beta` is 0.
    pub c: u64,
    /// Factor of C; with 0 the product alone is written.
    pub beta: f32,
    /// Address of D on the device.
    pub d: u64,
    /// Type of C and D.
    pub result: DType,
    /// Address of a bias of D's type, m elements.
    pub bias: Option<u64>,
    /// What happens to the sums before they are written.
    pub epilogue: Epilogue,
}

/// The properties of a product that decide its algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    product: GemmLayout,
    factors: DType,
    result: DType,
    epilogue: u32,
    side_ld: usize,
    kept: bool,
    /// Alignment of the addresses of A, B, C and D in bytes.
    aligned: [u32; 4],
}

/// The library, its workspace, and the chosen algorithms.
pub struct Products {
    handle: sys::cublasLtHandle_t,
    /// `None` where the library has no algorithm.
    chosen: Mutex<HashMap<Key, Option<sys::cublasLtMatmulAlgo_t>>>,
    pub(crate) workspace: Mutex<Option<Memory>>,
}

// SAFETY: the library's handle may be used from any thread.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Products {
    pub fn new() -> Result<Self, CublasError> {
        Ok(Self { handle: result::create_handle()?, chosen: Mutex::default(), workspace: Mutex::default() })
    }
}

impl Gpu {
    /// Enqueues a product on the device's stream.
    pub fn product(&'static self, call: Call) {
        let GemmLayout { m, n, k, .. } = call.product;
        if m == 0 || n == 0 || k == 0 || self.attempt("a product", self.bind()).is_none() {
            return;
        }
        self.lend(&self.products.workspace, CUDA_WORKSPACE, "products", |workspace| {
            let done = self.run(&call, workspace);
            let what = format!("a product of {m} x {n} x {k}");
            self.attempt(&what, done);
            self.settle(&what);
        });
    }

    fn run(&self, call: &Call, workspace: &Memory) -> Result<(), CublasError> {
        let description = Description::of(call)?;
        let algorithm = self.algorithm(call, &description)?;
        // SAFETY: the descriptors are alive; the ops promise that the addresses are those of buffers that the layouts
        // describe; the workspace has the size that the algorithm was chosen for.
        unsafe {
            result::matmul(
                self.products.handle,
                description.product,
                from_ref(&call.alpha).cast(),
                from_ref(&call.beta).cast(),
                call.a as *const c_void,
                description.a,
                call.b as *const c_void,
                description.b,
                call.c as *const c_void,
                description.d,
                call.d as *mut c_void,
                description.d,
                from_ref(&algorithm),
                workspace.address() as *mut c_void,
                CUDA_WORKSPACE,
                self.stream().cast(),
            )
        }
    }
}

impl Gpu {
    /// Whether the library has an algorithm for a product: of those with an epilogue not every device has one.
    pub fn has_product(&self, call: &Call) -> bool {
        self.bind().is_ok()
            && Description::of(call).and_then(|description| self.algorithm(call, &description)).is_ok()
    }

    /// The algorithm of a product, chosen once.
    fn algorithm(
        &self,
        call: &Call,
        description: &Description,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let key = Key::of(call);
        let known = lock(&self.products.chosen).get(&key).copied();
        let algorithm = match known {
            Some(algorithm) => algorithm,
            None => {
                let algorithm = match description.choose(self.products.handle, key) {
                    Err(_) if call.epilogue != Epilogue::None => None,
                    found => Some(found?),
                };
                lock(&self.products.chosen).insert(key, algorithm);
                algorithm
            }
        };
        algorithm.ok_or(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED))
    }
}

impl Key {
    fn of(call: &Call) -> Self {
        Self {
            product: call.product,
            factors: call.factors,
            result: call.result,
            epilogue: call.epilogue.name(call.bias.is_some()) as u32,
            side_ld: call.epilogue.side().map_or(0, |side| side.ld),
            kept: call.beta != 0.0,
            aligned: [call.a, call.b, call.c, call.d].map(alignment),
        }
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// The library's descriptors of one call.
struct Description {
    product: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    d: sys::cublasLtMatrixLayout_t,
}

impl Description {
    fn of(call: &Call) -> Result<Self, CublasError> {
        let none = std::ptr::null_mut();
        let product = result::create_matmul_desc(CUBLAS_COMPUTE_32F, data_type(DType::F32))?;
        // From here on an early return destroys the descriptors made so far.
        let mut made = Self { product, a: none, b: none, d: none };
        let GemmLayout { a, b, d, .. } = call.product;
        made.a = layout(a, call.factors)?;
        made.b = layout(b, call.factors)?;
        made.d = layout(d, call.result)?;
        made.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(a.transposed))?;
        made.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(b.transposed))?;
        let epilogue = call.epilogue.name(call.bias.is_some());
        made.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if let Some(bias) = call.bias {
            made.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        if let Some(side) = call.epilogue.side() {
            made.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, side.address)?;
            made.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, side.ld as i64)?;
        }
        Ok(made)
    }

    fn set<T>(&self, attribute: DescAttribute, value: T) -> Result<(), CublasError> {
        // SAFETY: the descriptor is alive, and the value is of the attribute's type.
        unsafe {
            result::set_matmul_desc_attribute(
                self.product,
                attribute,
                from_ref(&value).cast(),
                size_of::<T>(),
            )
        }
    }

    /// The algorithm that the library ranks fastest within the workspace, of those that sum in FP32.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        key: Key,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let preference = Preference(result::create_matmul_pref()?);
        preference.set(PrefAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUDA_WORKSPACE as u64)?;
        preference.set(PrefAttribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCED_IN_COMPUTE_TYPE)?;
        let [a, b, c, d] = key.aligned;
        preference.set(PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a)?;
        preference.set(PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b)?;
        preference.set(PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c)?;
        preference.set(PrefAttribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d)?;
        // SAFETY: all descriptors are alive.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                handle,
                self.product,
                self.a,
                self.b,
                self.d,
                self.d,
                preference.0,
            )
        };
        Ok(found?.algo)
    }
}

/// Parts of a sum over k are added in FP32 in a fixed order, so that two runs have the same results.
const REDUCED_IN_COMPUTE_TYPE: u32 = 2;

fn layout(operand: Operand, dtype: DType) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let Operand { rows, cols, ld, .. } = operand;
    result::create_matrix_layout(data_type(dtype), rows as u64, cols as u64, ld as i64)
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: each was made once, or is null, which the library takes as nothing.
        unsafe {
            for layout in [self.a, self.b, self.d] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_matmul_desc(self.product);
        }
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn set<T>(&self, attribute: PrefAttribute, value: T) -> Result<(), CublasError> {
        // SAFETY: the preference is alive, and the value is of the attribute's type.
        unsafe {
            result::set_matmul_pref_attribute(self.0, attribute, from_ref(&value).cast(), size_of::<T>())
        }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made once, dropped once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
