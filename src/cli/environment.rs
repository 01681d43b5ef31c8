//! The environment: the one place that reads it.

use std::{ffi::OsString, fs, path::PathBuf};

use crate::{
    error::{Error, Result},
    hub::HubOptions,
};

/// What the environment says about caches and the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Folder for FP16 copies and fingerprints of bases.
    pub cache: PathBuf,
    endpoint: Option<String>,
    hub_cache: PathBuf,
    token: Option<String>,
    offline: bool,
}

impl Environment {
    /// The environment of this process.
    ///
    /// # Errors
    /// As [`Environment::from_variables`].
    pub fn read() -> Result<Self> {
        Self::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// `ENGRAFT_CACHE`, `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_OFFLINE`, `XDG_CACHE_HOME` and `HOME`, with the meanings huggingface_hub gives them.
    ///
    /// # Errors
    /// When no folder for caches can be told, or a variable is not UTF-8.
    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let path = |name: &str| variable(name).map(PathBuf::from);
        let caches = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
        let under_caches = |name: &str| {
            caches.as_ref().map(|caches| caches.join(name)).ok_or_else(|| {
                Error::input("HOME: is not set, so there is no folder for caches; set HOME, or ENGRAFT_CACHE and HF_HOME")
            })
        };
        let cache = path("ENGRAFT_CACHE").map_or_else(|| under_caches("engraft"), Ok)?;
        let hub_home = path("HF_HOME").map_or_else(|| under_caches("huggingface"), Ok)?;
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| hub_home.join("token"));
        let text = |name: &str| match variable(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
            Some(Err(_)) => Err(Error::input(format!("{name}: is not UTF-8; correct the variable"))),
        };
        Ok(Self {
            cache,
            endpoint: text("HF_ENDPOINT")?,
            hub_cache: path("HF_HUB_CACHE").unwrap_or_else(|| hub_home.join("hub")),
            token: text("HF_TOKEN")?
                .or_else(|| fs::read_to_string(token_file).ok().map(|token| token.trim().to_owned())),
            offline: text("HF_HUB_OFFLINE")?.is_some_and(|value| is_true(&value)),
        })
    }

    /// How to reach the hub.
    pub fn hub(&self, revision: Option<&str>, offline: bool) -> HubOptions {
        HubOptions {
            endpoint: self.endpoint.clone(),
            token: self.token.clone().filter(|token| !token.is_empty()),
            cache: self.hub_cache.clone(),
            revision: revision.map(str::to_owned),
            offline: offline || self.offline,
        }
    }
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Result<Environment> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Environment::from_variables(|name| find(name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn home_alone_is_enough() {
        let found = environment(&[("HOME", "/h")]).unwrap();
        assert_eq!(found.cache, PathBuf::from("/h/.cache/engraft"));
        assert_eq!(found.hub_cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert!(!found.hub(None, false).offline && found.hub(None, true).offline);
        assert!(environment(&[]).unwrap_err().to_string().contains("HOME"));
    }

    #[test]
    fn the_nearer_variable_wins() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("token"), "secret\n").unwrap();
        let folder = home.path().to_str().unwrap();
        let mut variables =
            vec![("HOME", "/h"), ("HF_HOME", folder), ("HF_HUB_OFFLINE", "1"), ("ENGRAFT_CACHE", "/e")];
        let found = environment(&variables).unwrap();
        assert_eq!((found.token.as_deref(), found.offline), (Some("secret"), true));
        assert_eq!((found.hub_cache.clone(), found.cache), (home.path().join("hub"), PathBuf::from("/e")));
        variables.extend([("HF_TOKEN", "mine"), ("HF_HUB_CACHE", "/c")]);
        let found = environment(&variables).unwrap();
        assert_eq!((found.token.as_deref(), found.hub_cache), (Some("mine"), PathBuf::from("/c")));
    }
}
