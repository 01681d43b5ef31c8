//! From what was typed as `--data` to files: those of the hub are fetched.

use std::path::PathBuf;

use crate::{
    cli::common::{args::BaseArgs, environment::Environment, open},
    error::Result,
    train::DataSource,
};

/// `paths`, with the files of the hub among them in its cache.
///
/// # Errors
/// When one cannot be found or downloaded.
pub fn files(paths: &[PathBuf], args: &BaseArgs, environment: &Environment) -> Result<Vec<PathBuf>> {
    let offline = args.offline == Some(true);
    paths.iter().map(|path| open::data_file(path, offline, environment)).collect()
}

/// As [`files`], of a source that may be embedded.
///
/// # Errors
/// As [`files`].
pub fn fetched(source: DataSource, args: &BaseArgs, environment: &Environment) -> Result<DataSource> {
    match source {
        DataSource::Embedded => Ok(DataSource::Embedded),
        DataSource::Files(paths) => files(&paths, args, environment).map(DataSource::Files),
    }
}
