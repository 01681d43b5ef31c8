//! `engraft report`: runs side by side, from their `metrics.jsonl`, also while they go on.

use std::path::PathBuf;

use clap::Args;

use crate::{
    cli::{
        common::output::{write_json, write_out},
        train::report_page::{self, History},
    },
    error::Result,
};

/// Options of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run folders
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Write the page here [default: report.html, in the run folder of a single run]
    #[arg(long, value_name = "FILE.html")]
    output: Option<PathBuf>,
    /// One JSON object per run on stdout, and no page unless --output is given
    #[arg(long)]
    json: bool,
}

/// Runs `engraft report`.
///
/// # Errors
/// When a folder has no record, or the page cannot be written.
pub fn run(args: &ReportArgs) -> Result<()> {
    let runs = args.runs.iter().map(|folder| History::read(folder)).collect::<Result<Vec<_>>>()?;
    if args.json {
        if args.output.is_some() {
            report_page::write_of(&runs, args.output.as_deref())?;
        }
        return runs.iter().try_for_each(|run| write_json(&report_page::summary(run)));
    }
    let page = report_page::write_of(&runs, args.output.as_deref())?;
    write_out(&format!("{}page: {}\n", report_page::lines(&runs), page.display()))
}
