//! The environment: the one place that reads it.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    hub::{HubOptions, Proxies},
};

/// Settings of caches and the hub from environment variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// `None` where no variable tells a folder for caches: what needs none works all the same.
    cache: Option<PathBuf>,
    hub_cache: Option<PathBuf>,
    endpoint: Option<String>,
    token: Option<String>,
    /// The variable or the file that the token is from.
    token_source: Option<String>,
    offline: bool,
    proxies: Proxies,
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
    /// `HF_HUB_OFFLINE`, `XDG_CACHE_HOME` and `HOME`, with the meanings huggingface_hub gives them;
    /// `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`, in small letters too.
    ///
    /// # Errors
    /// When a variable is not UTF-8.
    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let path = |name: &str| variable(name).map(PathBuf::from);
        let caches = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
        let under_caches = |name: &str| caches.as_ref().map(|caches| caches.join(name));
        let cache = path("ENGRAFT_CACHE").or_else(|| under_caches("engraft"));
        let hub_home = path("HF_HOME").or_else(|| under_caches("huggingface"));
        let token_file = path("HF_TOKEN_PATH").or_else(|| hub_home.as_ref().map(|home| home.join("token")));
        let text = |name: &str| match variable(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
            Some(Err(_)) => Err(Error::input(format!("{name}: is not UTF-8; correct the variable"))),
        };
        // Small letters first, as curl has it.
        let proxy = |name: &str| match text(&name.to_ascii_lowercase())? {
            None => text(name),
            found => Ok(found),
        };
        let all = proxy("ALL_PROXY")?;
        let (token, token_source) = match text("HF_TOKEN")? {
            Some(token) => (Some(token), Some("HF_TOKEN".to_owned())),
            None => match token_file.and_then(|file| Some((fs::read_to_string(&file).ok()?, file))) {
                Some((token, file)) => (Some(token.trim().to_owned()), Some(file.display().to_string())),
                None => (None, None),
            },
        };
        Ok(Self {
            cache,
            endpoint: text("HF_ENDPOINT")?,
            hub_cache: path("HF_HUB_CACHE").or_else(|| hub_home.map(|home| home.join("hub"))),
            token: token.filter(|token| !token.is_empty()),
            token_source,
            offline: text("HF_HUB_OFFLINE")?.is_some_and(|value| is_true(&value)),
            proxies: Proxies {
                https: proxy("HTTPS_PROXY")?.or_else(|| all.clone()),
                http: proxy("HTTP_PROXY")?.or(all),
                except: proxy("NO_PROXY")?.unwrap_or_default(),
            },
        })
    }

    /// Folder for FP16 copies and fingerprints of bases.
    ///
    /// # Errors
    /// When no variable tells one.
    pub fn cache(&self) -> Result<&Path> {
        self.cache.as_deref().ok_or_else(|| homeless("ENGRAFT_CACHE"))
    }

    /// Folder of the hub's downloads, which other programs use too; `None` when no variable tells one.
    pub fn hub_cache(&self) -> Option<&Path> {
        self.hub_cache.as_deref()
    }

    /// The variable or the file that the access token is from, if there is one.
    pub fn token_source(&self) -> Option<&str> {
        self.token_source.as_deref().filter(|_| self.token.is_some())
    }

    /// How to reach the hub.
    ///
    /// # Errors
    /// When no variable tells a folder for its cache.
    pub fn hub(&self, revision: Option<&str>, offline: bool) -> Result<HubOptions> {
        Ok(HubOptions {
            endpoint: self.endpoint.clone(),
            token: self.token.clone(),
            cache: self.hub_cache.clone().ok_or_else(|| homeless("HF_HOME"))?,
            revision: revision.map(str::to_owned),
            offline: offline || self.offline,
            proxies: self.proxies.clone(),
        })
    }
}

/// The variable that names a folder with images of kernels, for developers.
pub const KERNELS: &str = "ENGRAFT_KERNELS";

/// The folder that [`KERNELS`] names.
pub fn kernels() -> Option<PathBuf> {
    std::env::var_os(KERNELS).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn homeless(variable: &str) -> Error {
    Error::input(format!("HOME: is not set, so there is no folder for caches; set HOME or {variable}"))
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
        assert_eq!(found.cache().unwrap(), Path::new("/h/.cache/engraft"));
        let hub = |offline| found.hub(None, offline).unwrap();
        assert_eq!(hub(false).cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert!(!hub(false).offline && hub(true).offline);
    }

    #[test]
    fn no_home_is_an_error_only_where_a_cache_is_needed() {
        let found = environment(&[]).unwrap();
        assert!(found.cache().unwrap_err().to_string().contains("ENGRAFT_CACHE"));
        assert!(found.hub(None, false).unwrap_err().to_string().contains("HF_HOME"));
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
        let places =
            |found: &Environment| (found.hub(None, true).unwrap().cache, found.cache().unwrap().to_owned());
        assert_eq!(places(&found), (home.path().join("hub"), PathBuf::from("/e")));
        variables.extend([("HF_TOKEN", "mine"), ("HF_HUB_CACHE", "/c")]);
        let found = environment(&variables).unwrap();
        assert_eq!((found.token.as_deref(), places(&found).0), (Some("mine"), PathBuf::from("/c")));
    }

    #[test]
    fn proxies_are_those_of_the_scheme() {
        let proxies = |variables: &[(&str, &str)]| {
            let found = environment(&[&[("HOME", "/h")], variables].concat()).unwrap();
            found.hub(None, false).unwrap().proxies
        };
        let of = |https: &str, http: &str, except: &str| Proxies {
            https: Some(https.to_owned()).filter(|text| !text.is_empty()),
            http: Some(http.to_owned()).filter(|text| !text.is_empty()),
            except: except.to_owned(),
        };
        assert_eq!(proxies(&[]), Proxies::default());
        assert_eq!(proxies(&[("HTTPS_PROXY", "a"), ("https_proxy", "b")]), of("b", "", ""));
        assert_eq!(proxies(&[("http_proxy", "a"), ("NO_PROXY", "x, y")]), of("", "a", "x, y"));
        assert_eq!(proxies(&[("all_proxy", "a"), ("HTTP_PROXY", "b")]), of("a", "b", ""));
    }
}
