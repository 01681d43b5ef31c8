//! Requests to the hub, and to the stores that it redirects downloads to.

use std::{io, ops::Range, thread, time::Duration};

use ureq::{
    Agent, Body, Error as Failure, Proxy,
    http::{HeaderValue, Response, StatusCode, Uri, header},
    tls::{RootCerts, TlsConfig},
};

use super::{HubOptions, Proxies};
use crate::error::{Error, Result};

const HUB: &str = "https://huggingface.co";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection that sends nothing for so long is given up.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Pauses before the further tries after a failure that may pass.
pub(super) const WAITS: [Duration; 3] =
    [Duration::from_millis(200), Duration::from_millis(400), Duration::from_millis(800)];

const MOST_REDIRECTS: usize = 10;

/// The reason why a request to the hub failed.
#[derive(Debug)]
pub(super) enum Refusal {
    /// It answered with this status; `code` is its own word for the reason.
    Status { status: StatusCode, code: Option<String> },
    /// There was no answer.
    Unreachable(String),
    /// The answer ended too early.
    Cut(String),
    /// The answer is not as long as the file.
    Size { status: StatusCode, sent: u64, size: u64 },
    /// The answer lacks a header that a hub sends.
    Answer(&'static str),
    /// Writing to the disk failed.
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

impl Refusal {
    /// Whether the cache may be used instead: the hub could not say whether it has a newer file.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Status { status, .. } => matches!(status.as_u16(), 500 | 502..=504),
            _ => false,
        }
    }

    /// The reason for a failed `read` of a body.
    pub(super) fn cut(cause: &io::Error) -> Self {
        let failure = cause.get_ref().and_then(|inner| inner.downcast_ref::<Failure>());
        Self::Cut(failure.map_or_else(|| cause.to_string(), reason))
    }
}

/// The hub's answer about a file.
pub(super) enum Head {
    /// The file exists.
    File(Found),
    /// The repository, at this commit if the hub tells it, lacks the file, or there is no such repository.
    Absent { commit: Option<String> },
}

/// Commit, name and size of a file's bytes in the cache.
pub(super) struct Found {
    pub(super) commit: String,
    pub(super) etag: String,
    /// Bytes of the file, where the hub tells them.
    pub(super) size: Option<u64>,
}

/// The start of an answer whose status is a success.
pub(super) struct Answer {
    pub(super) body: Body,
    /// Bytes of the body, where the server tells them.
    pub(super) length: Option<u64>,
    /// Whether the body is the range that was asked for, not the whole file.
    pub(super) partial: bool,
}

/// One hub, with what is sent along to it.
pub(super) struct Client {
    endpoint: String,
    hub: Uri,
    token: Option<HeaderValue>,
    proxies: Proxies,
    direct: Agent,
    https: Agent,
    http: Agent,
}

impl Client {
    /// A client for the hub of `options`; sends nothing yet.
    ///
    /// # Errors
    /// When the address is none, or the token no header can carry.
    pub(super) fn new(options: &HubOptions) -> Result<Self> {
        let endpoint = options.endpoint.as_deref().unwrap_or(HUB).trim_end_matches('/');
        let wrong = |what: &str| {
            Error::input(format!("the hub's address {endpoint} cannot be used: {what}; check HF_ENDPOINT"))
        };
        let hub: Uri = endpoint.parse().map_err(|cause| wrong(&format!("{cause}")))?;
        if !matches!(hub.scheme_str(), Some("http" | "https")) || hub.host().is_none() {
            return Err(wrong("it does not begin with https:// or http://"));
        }
        let bearer = |token: &String| {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| Error::input("HF_TOKEN: holds what is in no token; correct it"))?;
            value.set_sensitive(true);
            Ok::<_, Error>(value)
        };
        let token = options.token.as_ref().map(bearer).transpose()?;
        let direct = agent(None);
        // As other programs do: an address that is none counts as no proxy.
        let through = |address: &Option<String>| {
            let proxy = address.as_deref().and_then(|address| Proxy::new(address).ok());
            proxy.map_or_else(|| direct.clone(), |proxy| agent(Some(proxy)))
        };
        Ok(Self {
            endpoint: endpoint.to_owned(),
            hub,
            token,
            https: through(&options.proxies.https),
            http: through(&options.proxies.http),
            direct,
            proxies: options.proxies.clone(),
        })
    }

    /// Asks the hub once who the token belongs to, for at most `patience`; the status of its answer.
    pub(super) fn ping(&self, patience: Duration) -> Result<StatusCode, String> {
        let address = self.address("api/whoami-v2");
        let address: Uri = address.parse().map_err(|_| format!("{address} is no address"))?;
        let mut request = self.agent(&address).get(&address);
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let answer = request.config().timeout_global(Some(patience)).build().call();
        answer.map(|response| response.status()).map_err(|failure| reason(&failure))
    }

    /// The address of the hub.
    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The address of `path` at the hub.
    pub(super) fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint)
    }

    /// Asks for the state of the file at `address`.
    pub(super) fn head(&self, address: &str) -> Result<Head, Refusal> {
        let response = self.ask("HEAD", address, None)?;
        let status = response.status();
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let commit = text("x-repo-commit").filter(|commit| is_file_name(commit)).map(str::to_owned);
        if status == StatusCode::NOT_FOUND {
            return Ok(Head::Absent { commit });
        }
        if !status.is_success() && !status.is_redirection() {
            return Err(refused(&response));
        }
        let etag = text("x-linked-etag")
            .or_else(|| text("etag"))
            .map(|etag| etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"'));
        let etag = etag.filter(|etag| is_file_name(etag)).ok_or(Refusal::Answer("no ETag"))?.to_owned();
        let commit = commit.ok_or(Refusal::Answer("no X-Repo-Commit"))?;
        // Content-Length of a redirect is that of the redirect's own page.
        let length = || text("content-length").filter(|_| status.is_success());
        let size = text("x-linked-size").or_else(length).and_then(|size| size.parse().ok());
        Ok(Head::File(Found { commit, etag, size }))
    }

    /// Asks for the bytes at `address`, all or those of `range`; `size` is that of the whole file.
    pub(super) fn get(
        &self,
        address: &str,
        range: Option<&Range<u64>>,
        size: Option<u64>,
    ) -> Result<Answer, Refusal> {
        let response = self.ask("GET", address, range)?;
        let status = response.status();
        let length = response.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
        let partial = status == StatusCode::PARTIAL_CONTENT;
        if let (Some(sent), Some(size), false) = (length, size, partial)
            && sent != size
        {
            return Err(Refusal::Size { status, sent, size });
        }
        if !status.is_success() {
            return Err(refused(&response));
        }
        Ok(Answer { body: response.into_body(), length, partial })
    }

    /// Sends a request until it is answered, and follows redirects. A HEAD ends before it leaves the hub,
    /// whose headers tell more than those of a store.
    fn ask(
        &self,
        method: &str,
        address: &str,
        range: Option<&Range<u64>>,
    ) -> Result<Response<Body>, Refusal> {
        let parse = |address: &str| address.parse().map_err(|_| Refusal::Answer("no address to go on at"));
        let mut address: Uri = parse(address)?;
        for _ in 0..=MOST_REDIRECTS {
            let response = self.send_patiently(method, &address, range)?;
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            match location.filter(|_| response.status().is_redirection()) {
                Some(location) if method != "HEAD" || !is_absolute(location) => {
                    address = parse(&join(&address, location))?;
                }
                _ => return Ok(response),
            }
        }
        Err(Refusal::Answer("redirects without end"))
    }

    fn send_patiently(
        &self,
        method: &str,
        address: &Uri,
        range: Option<&Range<u64>>,
    ) -> Result<Response<Body>, Refusal> {
        let mut waits = WAITS.iter();
        loop {
            let answer = self.send(method, address, range);
            let may_pass = match &answer {
                Ok(response) => matches!(response.status().as_u16(), 408 | 429 | 500 | 502..=504),
                Err(Failure::Io(_) | Failure::HostNotFound | Failure::ConnectionFailed) => true,
                Err(_) => false,
            };
            match waits.next().filter(|_| may_pass) {
                Some(wait) => thread::sleep(*wait),
                None => return answer.map_err(|failure| Refusal::Unreachable(reason(&failure))),
            }
        }
    }

    fn send(
        &self,
        method: &str,
        address: &Uri,
        range: Option<&Range<u64>>,
    ) -> Result<Response<Body>, Failure> {
        let agent = self.agent(address);
        let mut request = if method == "HEAD" { agent.head(address) } else { agent.get(address) };
        if let Some(token) = self.token_for(address) {
            request = request.header(header::AUTHORIZATION, token);
        }
        if let Some(range) = range {
            request = request.header(header::RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        }
        request.call()
    }

    /// The token, for an address of the hub: no store that the hub redirects to may see it.
    pub(super) fn token_for(&self, address: &Uri) -> Option<&HeaderValue> {
        let at_hub = address.scheme() == self.hub.scheme() && address.authority() == self.hub.authority();
        self.token.as_ref().filter(|_| at_hub)
    }

    pub(super) fn agent(&self, address: &Uri) -> &Agent {
        if self.proxies.except(address.host().unwrap_or_default()) {
            &self.direct
        } else if address.scheme_str() == Some("https") {
            &self.https
        } else {
            &self.http
        }
    }
}

fn agent(proxy: Option<Proxy>) -> Agent {
    let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
    let config = Agent::config_builder()
        .tls_config(tls)
        .proxy(proxy)
        .http_status_as_error(false)
        .max_redirects(0)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_per_read(Some(READ_TIMEOUT))
        .user_agent(concat!("engraft/", env!("CARGO_PKG_VERSION")))
        // A compressed answer has another length than the file.
        .accept_encoding("identity");
    config.build().into()
}

fn refused(response: &Response<Body>) -> Refusal {
    let code = response.headers().get("x-error-code").and_then(|value| value.to_str().ok());
    Refusal::Status { status: response.status(), code: code.map(str::to_owned) }
}

pub(super) fn reason(failure: &Failure) -> String {
    match failure {
        Failure::Io(cause) => cause.to_string(),
        Failure::Timeout(_) => "no answer in time".to_owned(),
        other => other.to_string(),
    }
}

fn is_absolute(location: &str) -> bool {
    location.starts_with("//")
        || location.split(['/', '?', '#']).next().is_some_and(|start| start.contains(':'))
}

/// The address that `location`, in an answer from `base`, stands for.
fn join(base: &Uri, location: &str) -> String {
    let scheme = base.scheme_str().unwrap_or("https");
    let authority = base.authority().map_or("", |authority| authority.as_str());
    if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if is_absolute(location) {
        location.to_owned()
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    }
}

/// `text` as a part of an address; its slashes stay.
pub(super) fn encode(text: &str) -> String {
    let keep = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes().fold(String::new(), |text, byte| match byte {
        byte if keep(byte) => text + char::from(byte).encode_utf8(&mut [0; 4]),
        byte => text + &format!("%{byte:02X}"),
    })
}

/// Commits and etags become names in the cache; a server could send anything.
pub(super) fn is_file_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"/\\".contains(&byte);
    !text.is_empty() && text.len() <= 200 && !text.starts_with('.') && text.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_escaped_and_joined() {
        assert_eq!(encode("refs/pr/1"), "refs/pr/1");
        assert_eq!(encode("a b#ü%"), "a%20b%23%C3%BC%25");
        let base: Uri = "https://hub.example:8443/a/b?c".parse().unwrap();
        for (location, wanted) in [
            ("/x/y?z=1:2", "https://hub.example:8443/x/y?z=1:2"),
            ("x", "https://hub.example:8443/a/x"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("http://cdn.example/x", "http://cdn.example/x"),
        ] {
            assert_eq!(join(&base, location), wanted);
        }
        assert!(is_absolute("//x/y") && is_absolute("https://x") && !is_absolute("/x?at=1:2"));
    }

    #[test]
    fn what_a_server_sends_is_no_path() {
        assert!(is_file_name("607a30d783dfa663caf39e06633721c8d4cfcd7e") && is_file_name("abc-12.3"));
        for text in ["", "..", ".lock", "a/b", "a\\b", "/etc", "a\nb"] {
            assert!(!is_file_name(text), "{text}");
        }
    }

    #[test]
    fn a_proxy_is_chosen_by_the_scheme_and_the_host() {
        let proxies = Proxies {
            https: Some("http://a:1".into()),
            http: Some("http://b:2".into()),
            except: ".corp".into(),
        };
        let client = Client::new(&HubOptions { proxies, ..HubOptions::default() }).unwrap();
        let host = |address: &str| {
            let agent =
                client.agent(&address.parse().unwrap()).config().proxy().map(|proxy| proxy.host().to_owned());
            agent.unwrap_or_default()
        };
        assert_eq!(host("https://huggingface.co/x"), "a");
        assert_eq!(host("http://huggingface.co/x"), "b");
        assert_eq!(host("https://hub.corp/x"), "");
    }

    #[test]
    fn a_token_that_no_header_carries_is_refused_unread() {
        let options = HubOptions { token: Some("hf_a\nb".into()), ..HubOptions::default() };
        let error = Client::new(&options).err().unwrap().to_string();
        assert!(error.contains("HF_TOKEN") && !error.contains("hf_a"), "{error}");
    }
}
