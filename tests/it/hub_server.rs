//! A hub of our own on a local port: resolve with redirects for large files, ranges, refusals, cuts.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

pub const COMMIT: &str = "607a30d783dfa663caf39e06633721c8d4cfcd7e";

/// Files and behaviour of the hub.
#[derive(Default)]
pub struct Hub {
    pub id: &'static str,
    pub files: BTreeMap<String, Vec<u8>>,
    /// The only token that may read; without one everybody may.
    pub token: Option<&'static str>,
    /// Whether the account of the token has accepted the licence.
    pub gated: bool,
    /// Answered to everything when set.
    pub status: Option<u16>,
    /// Answered to the download of a small file, whose HEAD goes well.
    pub get_status: Option<u16>,
    /// The next downloads of large files end after so many bytes.
    pub cuts: Vec<usize>,
    /// Downloads of large files begin so late.
    pub delay: Duration,
    /// Method, path and range of every request.
    pub log: Vec<String>,
}

impl Hub {
    pub fn new(id: &'static str, files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        Self { id, files: files.into_iter().collect(), ..Self::default() }
    }
}

/// A running hub; its thread ends with the test binary.
pub struct Server {
    pub endpoint: String,
    pub hub: Arc<Mutex<Hub>>,
}

impl Server {
    pub fn start(hub: Hub) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let hub = Arc::new(Mutex::new(hub));
        let (shared, address) = (Arc::clone(&hub), endpoint.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (hub, address) = (Arc::clone(&shared), address.clone());
                thread::spawn(move || answer(stream, &hub, &address));
            }
        });
        Self { endpoint, hub }
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut Hub) -> T) -> T {
        change(&mut self.hub.lock().unwrap())
    }

    /// The requests since the last call.
    pub fn log(&self) -> Vec<String> {
        self.with(|hub| std::mem::take(&mut hub.log))
    }
}

struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
}

struct Reply {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Bytes of the body that are really sent.
    sent: usize,
}

impl Reply {
    fn new(status: u16, headers: Vec<(&'static str, String)>, body: Vec<u8>) -> Self {
        let sent = body.len();
        Self { status, headers, body, sent }
    }

    fn refusal(status: u16, code: Option<&str>) -> Self {
        let headers = code.map(|code| ("X-Error-Code", code.to_owned())).into_iter().collect();
        Self::new(status, headers, b"refused".to_vec())
    }
}

fn answer(mut stream: TcpStream, hub: &Mutex<Hub>, endpoint: &str) {
    let Some(request) = read(&stream) else { return };
    let reply = {
        let mut hub = hub.lock().unwrap();
        let range = request.headers.get("range").map(|range| format!(" {range}")).unwrap_or_default();
        hub.log.push(format!("{} {}{range}", request.method, request.path));
        reply(&mut hub, &request, endpoint)
    };
    if request.path.starts_with("/cdn/") {
        let delay = hub.lock().unwrap().delay;
        thread::sleep(delay);
    }
    let mut head = format!("HTTP/1.1 {} x\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += &format!("Content-Length: {}\r\n\r\n", reply.body.len());
    let _ = stream.write_all(head.as_bytes());
    if request.method != "HEAD" {
        let _ = stream.write_all(&reply.body[..reply.sent]);
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let headers = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned())))
        .collect();
    Some(Request { method, path, headers })
}

fn reply(hub: &mut Hub, request: &Request, endpoint: &str) -> Reply {
    if let Some(status) = hub.status {
        return Reply::refusal(status, None);
    }
    if let Some(file) = request.path.strip_prefix("/cdn/") {
        return large(hub, request, file);
    }
    // A data set has an id that begins with `datasets/`.
    let path =
        request.path.trim_start_matches("/api/models").trim_start_matches("/api").trim_start_matches('/');
    let Some(rest) = path.strip_prefix(hub.id) else { return Reply::refusal(404, Some("RepoNotFound")) };
    if let Some(refused) = access(hub, request) {
        return refused;
    }
    let rest = rest.trim_start_matches("/resolve/").trim_start_matches("/revision/");
    let (revision, file) = rest.split_once('/').unwrap_or((rest, ""));
    if revision != "main" && revision != COMMIT {
        return Reply::refusal(404, Some("RevisionNotFound"));
    }
    if request.path.starts_with("/api/") {
        return Reply::new(
            200,
            vec![],
            format!("{{\"id\":\"{}\",\"sha\":\"{COMMIT}\"}}", hub.id).into_bytes(),
        );
    }
    resolve(hub, request, file, endpoint)
}

fn access(hub: &Hub, request: &Request) -> Option<Reply> {
    let wanted = hub.token?;
    let given = request.headers.get("authorization").map(String::as_str);
    match given {
        Some(given) if given == format!("Bearer {wanted}") => {
            hub.gated.then(|| Reply::refusal(403, Some("GatedRepo")))
        }
        _ => Some(Reply::refusal(401, hub.gated.then_some("GatedRepo"))),
    }
}

fn resolve(hub: &Hub, request: &Request, file: &str, endpoint: &str) -> Reply {
    let commit = ("X-Repo-Commit", COMMIT.to_owned());
    let Some(content) = hub.files.get(file) else {
        let mut reply = Reply::refusal(404, Some("EntryNotFound"));
        reply.headers.push(commit);
        return reply;
    };
    let etag = format!("\"{}\"", blake3::hash(content).to_hex());
    if file.ends_with(".safetensors") || file.ends_with(".bin") {
        let headers = vec![
            commit,
            ("X-Linked-ETag", etag),
            ("X-Linked-Size", content.len().to_string()),
            ("Location", format!("{endpoint}/cdn/{file}")),
        ];
        return Reply::new(302, headers, b"moved".to_vec());
    }
    if request.headers.get("if-none-match") == Some(&etag) {
        return Reply::new(304, vec![commit, ("ETag", etag)], Vec::new());
    }
    if let (Some(status), "GET") = (hub.get_status, request.method.as_str()) {
        return Reply::refusal(status, None);
    }
    Reply::new(200, vec![commit, ("ETag", etag)], content.clone())
}

fn large(hub: &mut Hub, request: &Request, file: &str) -> Reply {
    let Some(content) = hub.files.get(file) else { return Reply::refusal(404, None) };
    let range = request.headers.get("range").and_then(|range| {
        let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some(start.parse::<usize>().ok()?..end.parse::<usize>().ok()? + 1)
    });
    let mut reply = match range {
        Some(range) => Reply::new(206, vec![], content[range].to_vec()),
        None => Reply::new(200, vec![], content.clone()),
    };
    if request.method == "GET" && !hub.cuts.is_empty() {
        reply.sent = hub.cuts.remove(0).min(reply.sent);
    }
    reply
}
