//! Choice of the proxy for a request.

use std::net::IpAddr;

/// The proxies of a network, and the hosts that are reached without one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proxies {
    /// Address of the proxy for `https:` addresses.
    pub https: Option<String>,
    /// Address of the proxy for `http:` addresses.
    pub http: Option<String>,
    /// Names of hosts and domains, IP addresses and blocks of them (`10.0.0.0/8`), or `*`, between commas.
    pub except: String,
}

impl Proxies {
    /// Whether `host` is reached without a proxy. A domain stands for the hosts below it too.
    pub(super) fn except(&self, host: &str) -> bool {
        let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
        self.except.split(',').map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
            let entry = entry.to_ascii_lowercase();
            let domain = entry.trim_start_matches('*').trim_start_matches('.');
            let below = || host.strip_suffix(domain).is_some_and(|start| start.ends_with('.'));
            entry == "*" || (!domain.is_empty() && (host == domain || below())) || in_block(&host, &entry)
        })
    }
}

/// Whether `host` is an IP address whose first bits are those of `block`, `address/bits`.
fn in_block(host: &str, block: &str) -> bool {
    let parts = || {
        let (start, bits) = block.split_once('/')?;
        Some((host.parse::<IpAddr>().ok()?, start.parse::<IpAddr>().ok()?, bits.parse::<u32>().ok()?))
    };
    match parts() {
        Some((IpAddr::V4(host), IpAddr::V4(start), bits @ 0..=32)) => {
            (host.to_bits() ^ start.to_bits()).leading_zeros() >= bits
        }
        Some((IpAddr::V6(host), IpAddr::V6(start), bits @ 0..=128)) => {
            (host.to_bits() ^ start.to_bits()).leading_zeros() >= bits
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_hosts_domains_and_blocks() {
        let except =
            |list: &str, host: &str| Proxies { except: list.into(), ..Proxies::default() }.except(host);
        for (list, host) in [
            ("*", "huggingface.co"),
            ("localhost, huggingface.co", "huggingface.co"),
            ("huggingface.co", "cdn.HuggingFace.co"),
            (".corp", "hub.corp"),
            ("*.corp", "a.b.corp"),
            ("10.0.0.0/8,127.0.0.1", "10.250.3.4"),
            ("10.1.0.0/16", "10.1.255.255"),
            ("::1", "[::1]"),
            ("fd00::/8", "[fd12::3]"),
            ("0.0.0.0/0", "1.2.3.4"),
        ] {
            assert!(except(list, host), "{list}: {host}");
        }
        for (list, host) in [
            ("", "huggingface.co"),
            (" , ", "huggingface.co"),
            ("face.co", "huggingface.co"),
            ("cdn.huggingface.co", "huggingface.co"),
            ("10.1.0.0/16", "10.2.0.0"),
            ("10.1.0.0/33", "10.1.0.0"),
            ("10.0.0.0/8", "hub.corp"),
            ("0.0.0.0/0", "[fd12::3]"),
        ] {
            assert!(!except(list, host), "{list}: {host}");
        }
    }
}
