//! Completions for shells and manual pages, made from the definitions of the options.

use std::path::PathBuf;

use clap_complete::Shell;

use super::output::{write_note, write_out};
use crate::error::{Error, Result};

/// Options of `completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell to complete in
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// Options of `man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Folder for the pages of all commands; without it the program's page is printed
    #[arg(value_name = "DIR")]
    pub folder: Option<PathBuf>,
}

/// Prints a script that completes the program's commands and options.
///
/// # Errors
/// When the output cannot be written.
pub fn completions(mut program: clap::Command, args: &CompletionsArgs) -> Result<()> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    write_out(&String::from_utf8_lossy(&script))
}

/// Writes the manual pages of a program and its commands, or prints the page of the program.
///
/// # Errors
/// When a page cannot be written.
pub fn man(program: clap::Command, args: &ManArgs) -> Result<()> {
    let Some(folder) = &args.folder else {
        let mut page = Vec::new();
        // Into memory, which does not fail.
        let _ = clap_mangen::Man::new(program).render(&mut page);
        return write_out(&String::from_utf8_lossy(&page));
    };
    let name = program.get_name().to_owned();
    let written = std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(program, folder));
    written.map_err(|cause| Error::writing(folder, &cause))?;
    write_note(&format!("wrote {name}.1 and a page for each command to {}", folder.display()));
    Ok(())
}
