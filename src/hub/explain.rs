//! Turns the hub's refusals into messages for the user.

use ureq::http::StatusCode;

use super::{HubOptions, client::Refusal};
use crate::error::Error;

/// The requested repository, as errors name it.
pub(super) struct Asked<'a> {
    pub(super) id: &'a str,
    /// `model` or `data set`
    pub(super) what: &'static str,
    pub(super) options: &'a HubOptions,
}

impl Asked<'_> {
    /// The sentence for a failure while `file` was fetched.
    pub(super) fn explain(&self, file: &str, refusal: Refusal) -> Error {
        let id = self.id;
        match refusal {
            Refusal::Status { status, code } => self.refused(file, status, code.as_deref()),
            Refusal::Unreachable(cause) => self.unreachable(&cause),
            Refusal::Cut(cause) => Error::failed(format!(
                "{id}: the download of {file} was cut: {cause}; run the command again to go on from there"
            )),
            Refusal::Size { status, sent, size } => {
                let answered = if status.is_success() { String::new() } else { format!(" and {status}") };
                Error::failed(format!(
                    "{id}: the hub sent {sent} of the {size} bytes of {file}{answered}; try again"
                ))
            }
            Refusal::Answer(what) => Error::failed(format!(
                "{id}: {file} cannot be fetched: the hub's answer has {what}; check HF_ENDPOINT or try again"
            )),
            Refusal::Io(cause) => Error::failed(format!(
                "{id}: {file} cannot be stored in {}: {cause}; {}, with HF_HOME",
                self.options.cache.display(),
                engraft_util::atomic::remedy(&cause)
            )),
        }
    }

    fn refused(&self, file: &str, status: StatusCode, code: Option<&str>) -> Error {
        let id = self.id;
        match (status.as_u16(), code) {
            (401 | 403, Some("GatedRepo")) => Error::input(format!(
                "{id}: is gated; accept its licence on its page at the hub and set HF_TOKEN to a token of that account"
            )),
            (401, _) if self.options.token.is_some() => Error::input(format!(
                "{id}: the hub refuses the token; set HF_TOKEN to a valid token that may read it"
            )),
            (401, _) => Error::input(format!(
                "{id}: the hub knows no public {} of this name; check the id, \
                 or set HF_TOKEN to a token that may read it",
                self.what
            )),
            (403, _) => Error::input(format!(
                "{id}: the token in use may not read it; set HF_TOKEN to a token that may"
            )),
            (429, _) => Error::failed(format!(
                "{id}: the hub limits the rate of requests; wait a little and try again"
            )),
            _ => Error::failed(format!("{id}: the hub answered {status} for {file}; try again later")),
        }
    }

    /// The hub knows no such repository, or the repository no such revision; `code` is the hub's word for it.
    pub(super) fn no_revision(&self, code: Option<&str>) -> Error {
        let id = self.id;
        if code == Some("RepoNotFound") {
            return Error::input(format!("{id}: the hub knows no {} of this name; check the id", self.what));
        }
        Error::input(format!(
            "{id}: has no revision {}; give a branch, tag or commit that it has as --revision",
            self.revision()
        ))
    }

    /// The repository is there and lacks the file.
    pub(super) fn no_file(&self, files: &str) -> Error {
        Error::input(format!(
            "{}: holds no {files} at revision {}; {}",
            self.id,
            self.revision(),
            if self.what == "model" { "choose another model" } else { "name one of its files" }
        ))
    }

    /// Offline, and the cache lacks the file.
    pub(super) fn not_cached(&self, files: &str) -> Error {
        Error::input(format!(
            "{}: {files} at revision {} is not in {}; run once without --offline, or give a folder",
            self.id,
            self.revision(),
            self.options.cache.display()
        ))
    }

    fn unreachable(&self, cause: &str) -> Error {
        Error::failed(format!(
            "{}: the hub cannot be reached: {cause}; check the network, or give a folder",
            self.id
        ))
        .hint("--offline uses what the cache already holds")
    }

    fn revision(&self) -> &str {
        self.options.revision.as_deref().unwrap_or("main")
    }
}
