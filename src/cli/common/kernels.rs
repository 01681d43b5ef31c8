//! For developers: a folder with images of kernels that come before those of the program.

use std::{fs, path::Path};

use super::{environment, output::write_note};
use crate::{
    device::Device,
    error::{Error, Result},
};

/// Extension of an image; its stem is the op.
const EXTENSION: &str = "fatbin";

/// Has kernels taken from the folder that a developer named, and says so.
///
/// # Errors
/// When the folder cannot be read, has no image, or has one of an op that there is not.
pub fn take() -> Result<()> {
    let Some(folder) = environment::kernels() else { return Ok(()) };
    let ops = take_from(&folder)?.join(", ");
    write_note(&format!(
        "hint: kernels of {ops} are those of {} ({})",
        folder.display(),
        environment::KERNELS
    ));
    Ok(())
}

/// The ops whose images are in `folder`, taken.
fn take_from(folder: &Path) -> Result<Vec<&'static str>> {
    let unreadable = |path: &Path, cause: std::io::Error| {
        Error::input(format!(
            "{}: cannot be read: {cause}; name a folder of images in {}",
            path.display(),
            environment::KERNELS
        ))
    };
    let mut ops = Vec::new();
    for entry in fs::read_dir(folder).map_err(|cause| unreadable(folder, cause))? {
        let path = entry.map_err(|cause| unreadable(folder, cause))?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            let code = fs::read(&path).map_err(|cause| unreadable(&path, cause))?;
            ops.push(Device::take_kernels(&path, &code)?);
        }
    }
    if ops.is_empty() {
        return Err(Error::input(format!(
            "{}: has no image; an image is called like its op, such as layernorm.{EXTENSION}",
            folder.display()
        )));
    }
    ops.sort_unstable();
    Ok(ops)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_images_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let refused = |folder: &Path| take_from(folder).unwrap_err().to_string();
        assert!(refused(&home.path().join("missing")).contains("missing: cannot be read: "));
        fs::write(home.path().join("layernorm.cu"), "").unwrap();
        assert!(refused(home.path()).contains("has no image; an image is called like its op"));
    }
}
