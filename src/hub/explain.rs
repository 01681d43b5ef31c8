//! What the hub's refusals mean for the user.

use hf_hub::HFError;

use super::HubOptions;
use crate::error::Error;

/// What was asked for, as errors name it.
pub(super) struct Asked<'a> {
    pub(super) id: &'a str,
    pub(super) options: &'a HubOptions,
}

impl Asked<'_> {
    /// The sentence for a failure while `file` was fetched.
    pub(super) fn explain(&self, file: &str, cause: &HFError) -> Error {
        let id = self.id;
        let code = code(cause);
        match (cause, code) {
            (HFError::AuthRequired { .. } | HFError::Forbidden { .. }, Some("GatedRepo")) => {
                Error::input(format!(
                    "{id}: is gated; accept its licence on its page at the hub and set HF_TOKEN to a token of that account"
                ))
            }
            (HFError::AuthRequired { .. }, _) if self.options.token.is_some() => Error::input(format!(
                "{id}: the hub refuses the token; set HF_TOKEN to a valid token that may read it"
            )),
            (HFError::AuthRequired { .. }, _) => Error::input(format!(
                "{id}: the hub knows no public model of this name; check the id, \
                 or set HF_TOKEN to a token that may read it"
            )),
            (HFError::Forbidden { .. }, _) => Error::input(format!(
                "{id}: the token in use may not read it; set HF_TOKEN to a token that may"
            )),
            (HFError::RevisionNotFound { .. }, Some("RepoNotFound")) | (HFError::RepoNotFound { .. }, _) => {
                Error::input(format!("{id}: the hub knows no model of this name; check the id"))
            }
            (HFError::RevisionNotFound { .. }, _) => Error::input(format!(
                "{id}: has no revision {}; give a branch, tag or commit that it has as --revision",
                self.revision()
            )),
            (HFError::RateLimited { .. }, _) => Error::failed(format!(
                "{id}: the hub limits the rate of requests; wait a little and try again"
            )),
            (HFError::Http { context }, _) => Error::failed(format!(
                "{id}: the hub answered {} for {file}; try again later",
                context.status
            )),
            (HFError::Request { source, .. }, _) if source.is_connect() || source.is_timeout() => {
                self.unreachable(&root(source))
            }
            (HFError::Request { source, .. }, _) => Error::failed(format!(
                "{id}: the download of {file} was cut: {}; run the command again to go on from there",
                root(source)
            )),
            (HFError::Io(cause), _) => Error::failed(format!(
                "{id}: {file} cannot be stored in {}: {cause}; free space or choose another folder with HF_HOME",
                self.options.cache.display()
            )),
            _ => Error::failed(format!("{id}: {file} cannot be fetched: {cause}; try again")),
        }
    }

    /// The repository is there and lacks the file.
    pub(super) fn no_file(&self, files: &str) -> Error {
        Error::input(format!(
            "{}: holds no {files} at revision {}; choose another model",
            self.id,
            self.revision()
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

/// The hub's own word for a refusal, from its `X-Error-Code`.
fn code(cause: &HFError) -> Option<&str> {
    match cause {
        HFError::AuthRequired { context } | HFError::Forbidden { context } | HFError::Http { context } => {
            context.error_code.as_deref()
        }
        HFError::RepoNotFound { context, .. } | HFError::RevisionNotFound { context, .. } => {
            context.as_ref()?.error_code.as_deref()
        }
        _ => None,
    }
}

/// The innermost cause: the outer ones repeat the address.
fn root(error: &dyn std::error::Error) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    inner.to_string()
}
