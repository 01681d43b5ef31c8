//! The code of kernels: what the build embedded, or, for developers, images from a folder, so that a kernel can be
//! changed and compiled on a machine without Rust.

use std::{
    ffi::c_void,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use cudarc::driver::{DriverError, result};

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
const OPS: &[&str] = include!(concat!(env!("OUT_DIR"), "/ops.rs"));

/// Extension of an image's file.
const EXTENSION: &str = "fatbin";

/// The folder whose images come before the embedded ones.
static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Has the images `OP.fatbin` in `folder` loaded instead of the embedded ones of the same ops, and returns these ops. The
/// first folder that is named stays the one of this process; images that are loaded already stay too.
///
/// # Errors
/// [`Error::Input`] when the folder cannot be read, has no image, or has one of an op that there is not.
pub fn take_images_from(folder: &Path) -> Result<Vec<&'static str>> {
    let refuse = |path: &Path, why: &str| Error::input(format!("{}: {why}", path.display()));
    let unreadable = |cause| refuse(folder, &format!("cannot be read: {cause}; name a folder of images"));
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        let stem = path.file_stem().unwrap_or_default();
        let Some(op) = OPS.iter().copied().find(|op| stem == *op) else {
            let ops = OPS.join(", ");
            return Err(refuse(&path, &format!("is the image of no op; there are {ops}")));
        };
        found.push(op);
    }
    if found.is_empty() {
        return Err(refuse(folder, "has no image; an image is called like its op, such as layernorm.fatbin"));
    }
    found.sort_unstable();
    let _ = FOLDER.set(folder.to_owned());
    Ok(found)
}

impl Image {
    /// Loads the code for the device that this thread uses, and returns the address of the module.
    pub(super) fn load(&self) -> Result<usize, String> {
        let file = FOLDER.get().map(|folder| folder.join(self.op).with_extension(EXTENSION));
        let Some(file) = file.filter(|file| file.exists()) else {
            return load(self.code.0.as_ptr().cast()).map_err(|cause| cause.to_string());
        };
        let words = read(&file)?;
        load(words.as_ptr().cast()).map_err(|cause| {
            format!("{}: {cause}; compile it for this device with nvcc 13.0", file.display())
        })
    }
}

/// Loads code, of which the driver keeps a copy.
fn load(code: *const c_void) -> Result<usize, DriverError> {
    // SAFETY: the code is the CUDA compiler's whole output. The driver reads no further than its header says, and refuses
    // what has none; a developer answers for a file in the folder.
    unsafe { result::module::load_data(code) }.map(|module| module as usize)
}

/// A file's bytes, aligned for the driver, with at least 16 zeros behind them: text ends with one.
fn read(file: &Path) -> Result<Vec<u128>, String> {
    let bytes = fs::read(file).map_err(|cause| format!("{}: cannot be read: {cause}", file.display()))?;
    let word = |chunk: &[u8]| {
        let mut word = [0; 16];
        word[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(word)
    };
    Ok(bytes.chunks(16).map(word).chain([0]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_images_or_with_others_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let refused = |folder: &Path| take_images_from(folder).unwrap_err().to_string();
        assert!(refused(&home.path().join("missing")).contains("missing: cannot be read: "));
        fs::write(home.path().join("layernorm.cu"), "").unwrap();
        assert!(refused(home.path()).contains("has no image; an image is called like its op"));
        fs::write(home.path().join("layernrom.fatbin"), "").unwrap();
        let text = refused(home.path());
        assert!(
            text.contains("layernrom.fatbin: is the image of no op; there are activation, adamw, "),
            "{text}"
        );
    }

    #[test]
    fn a_read_image_is_aligned_and_ends_with_zeros() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("x.fatbin");
        for length in [1, 15, 16, 17] {
            fs::write(&file, vec![7u8; length]).unwrap();
            let bytes: Vec<u8> = read(&file).unwrap().into_iter().flat_map(u128::to_ne_bytes).collect();
            assert!(bytes[..length].iter().all(|byte| *byte == 7), "{length}");
            assert!(bytes.len() >= length + 16 && bytes[length..].iter().all(|byte| *byte == 0), "{length}");
        }
    }
}
