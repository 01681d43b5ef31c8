//! The code of kernels: what the build embedded, or, for developers, an image that takes its place, so that a kernel can
//! be changed and compiled on a machine without Rust.

use std::{
    collections::HashMap,
    ffi::c_void,
    path::{Path, PathBuf},
    sync::Mutex,
};

use cudarc::driver::{DriverError, result};

use super::lock;
use crate::error::{Error, Result};

/// The code of an op's kernels: machine code for some devices, and PTX for later ones.
pub struct Image {
    /// Folder of the op.
    pub op: &'static str,
    /// The fat binary that the CUDA compiler wrote.
    pub code: &'static Code<[u8]>,
}

/// Bytes aligned for the driver.
#[repr(C, align(16))]
pub struct Code<B: ?Sized>(pub B);

/// The [`Image`] of the op in folder `$op`.
macro_rules! image {
    ($op:literal) => {
        $crate::device::cuda::Image {
            op: $op,
            code: &$crate::device::cuda::Code(*include_bytes!(concat!(env!("OUT_DIR"), "/", $op, ".fatbin"))),
        }
    };
}
pub(crate) use image;

/// Every op that has kernels.
const OPS: [&str; 17] = [
    "activation",
    "adamw",
    "adamw8",
    "adapted_linear",
    "argmax",
    "attention",
    "column_norms",
    "decode_layer",
    "elementwise",
    "embed",
    "gather",
    "head_loss",
    "layernorm",
    "matmul",
    "nf4",
    "noise",
    "q8",
];

/// An image from a file: where it is from, and its bytes, aligned for the driver.
type Taken = (PathBuf, Vec<u128>);

/// Images that take the place of embedded ones, by op.
static TAKEN: Mutex<Option<HashMap<&'static str, Taken>>> = Mutex::new(None);

/// Has `code` loaded instead of the embedded image of the op that `path` is called like (`layernorm.fatbin`), and returns
/// the op. An image that is loaded already stays.
///
/// # Errors
/// [`Error::Input`] when there is no such op.
pub fn take_image(path: &Path, code: &[u8]) -> Result<&'static str> {
    let stem = path.file_stem().unwrap_or_default();
    let Some(op) = OPS.into_iter().find(|op| stem == *op) else {
        return Err(Error::input(format!(
            "{}: is the image of no op; there are {}",
            path.display(),
            OPS.join(", ")
        )));
    };
    lock(&TAKEN).get_or_insert_default().insert(op, (path.to_owned(), aligned(code)));
    Ok(op)
}

impl Image {
    /// Loads the code for the device that this thread uses, and returns the address of the module.
    pub(super) fn load(&self) -> Result<usize, String> {
        match lock(&TAKEN).as_ref().and_then(|taken| taken.get(self.op)) {
            None => load(self.code.0.as_ptr().cast()).map_err(|cause| cause.to_string()),
            Some((path, words)) => load(words.as_ptr().cast()).map_err(|cause| {
                format!("{}: {cause}; compile it for this device with nvcc 13.0", path.display())
            }),
        }
    }
}

/// Loads code, of which the driver keeps a copy.
fn load(code: *const c_void) -> Result<usize, DriverError> {
    // SAFETY: the code is the CUDA compiler's whole output. The driver reads no further than its header says, and refuses
    // what has none; a developer answers for a file in the folder.
    unsafe { result::module::load_data(code) }.map(|module| module as usize)
}

/// Bytes aligned for the driver, with at least 16 zeros behind them: code that is text ends with one.
fn aligned(bytes: &[u8]) -> Vec<u128> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 16];
        word[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(word)
    };
    bytes.chunks(16).map(word).chain([0]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_that_has_kernels_is_listed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
        let mut found: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|op| op.join("kernel.cu").exists())
            .map(|op| op.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        found.sort_unstable();
        assert_eq!(found, OPS);
    }

    #[test]
    fn an_image_belongs_to_the_op_that_it_is_called_like() {
        assert_eq!(take_image(Path::new("folder/layernorm.fatbin"), b"code").unwrap(), "layernorm");
        let text = take_image(Path::new("folder/layernrom.fatbin"), b"code").unwrap_err().to_string();
        let expected = "folder/layernrom.fatbin: is the image of no op; there are activation, adamw, ";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn an_image_is_aligned_and_ends_with_zeros() {
        for length in [1, 15, 16, 17] {
            let bytes: Vec<u8> = aligned(&vec![7; length]).into_iter().flat_map(u128::to_ne_bytes).collect();
            assert!(bytes[..length].iter().all(|byte| *byte == 7), "{length}");
            assert!(bytes.len() >= length + 16 && bytes[length..].iter().all(|byte| *byte == 0), "{length}");
        }
    }
}
