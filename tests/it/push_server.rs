//! A hub of our own that takes pushes: new and existing repositories, large files, refusals, cuts.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};

pub const TOKEN: &str = "hf_right";

/// What the hub holds, and how it behaves.
#[derive(Default)]
pub struct Pushes {
    /// Repositories that exist, private or not.
    pub repositories: BTreeMap<String, bool>,
    /// Owners that the token may make repositories for.
    pub may_create: BTreeSet<String>,
    /// Owners in whose repositories the token may write.
    pub may_write: BTreeSet<String>,
    /// Large files by SHA-256.
    pub large: BTreeMap<String, Vec<u8>>,
    /// Lines of the commits, by repository.
    pub commits: Vec<(String, Vec<Value>)>,
    /// So many requests to the store for large files are cut.
    pub cuts: usize,
    /// Method and path of every request, with `+` for one that carried the token.
    pub log: Vec<String>,
}

/// A running hub; its thread ends with the test binary.
pub struct PushServer {
    pub endpoint: String,
    pub hub: Arc<Mutex<Pushes>>,
}

impl PushServer {
    pub fn start(hub: Pushes) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        // The store is at another address, as the real one's.
        let store = TcpListener::bind("127.0.0.1:0").unwrap();
        let store_address = format!("http://{}", store.local_addr().unwrap());
        let hub = Arc::new(Mutex::new(hub));
        for listener in [listener, store] {
            let (shared, store_address, endpoint) =
                (Arc::clone(&hub), store_address.clone(), endpoint.clone());
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    answer(stream, &shared, &endpoint, &store_address);
                }
            });
        }
        Self { endpoint, hub }
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut Pushes) -> T) -> T {
        change(&mut self.hub.lock().unwrap())
    }

    pub fn log(&self) -> Vec<String> {
        self.with(|hub| std::mem::take(&mut hub.log))
    }
}

struct Request {
    method: String,
    path: String,
    token: Option<String>,
    content: String,
    body: Vec<u8>,
}

impl Request {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

fn answer(stream: TcpStream, hub: &Mutex<Pushes>, endpoint: &str, store: &str) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let Some(request) = read(&mut reader) else { return };
    let mut hub = hub.lock().unwrap();
    let mark = if request.token.is_some() { "+" } else { "" };
    hub.log.push(format!("{mark}{} {}", request.method, request.path));
    if request.path.starts_with("/store/") && hub.cuts > 0 {
        hub.cuts -= 1;
        return;
    }
    let (status, body) = reply(&mut hub, &request, endpoint, store);
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = stream;
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(body.as_bytes());
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let token = headers.get("authorization").map(|value| value.trim_start_matches("Bearer ").to_owned());
    let content = headers.get("content-type").cloned().unwrap_or_default();
    Some(Request { method, path, token, content, body })
}

fn reply(hub: &mut Pushes, request: &Request, endpoint: &str, store: &str) -> (u16, Value) {
    if let Some(oid) = request.path.strip_prefix("/store/") {
        assert_eq!(
            (request.method.as_str(), &request.token),
            ("PUT", &None),
            "the store must not see the token"
        );
        hub.large.insert(oid.to_owned(), request.body.clone());
        return (200, Value::Null);
    }
    if request.token.as_deref() != Some(TOKEN) {
        return (401, json!({ "error": "Invalid username or password." }));
    }
    if request.path == "/api/repos/create" {
        return create(hub, &request.json(), endpoint);
    }
    let path = request.path.trim_start_matches("/api/models/").trim_start_matches('/').to_owned();
    let id: String = path.split('/').take(2).collect::<Vec<_>>().join("/");
    let id = id.trim_end_matches(".git").to_owned();
    if !hub.repositories.contains_key(&id) {
        return (404, json!({ "error": "Repository not found" }));
    }
    let owner = id.split('/').next().unwrap_or_default().to_owned();
    if request.method == "POST" && !hub.may_write.contains(&owner) {
        return (403, json!({ "error": "Forbidden: you must use a write token" }));
    }
    match path[id.len()..].trim_start_matches(".git") {
        "" => (200, json!({ "id": id })),
        "/preupload/main" => preupload(&request.json()),
        "/info/lfs/objects/batch" => batch(hub, &request.json(), store),
        "/commit/main" => commit(hub, &id, request),
        other => (500, json!({ "error": format!("no answer for {other}") })),
    }
}

fn create(hub: &mut Pushes, body: &Value, endpoint: &str) -> (u16, Value) {
    let owner = body["organization"].as_str().unwrap();
    let id = format!("{owner}/{}", body["name"].as_str().unwrap());
    if !hub.may_create.contains(owner) {
        return (
            403,
            json!({ "error": format!("You don't have the rights to create a model under {owner:?}") }),
        );
    }
    if hub.repositories.contains_key(&id) {
        return (409, json!({ "error": "You already created this model repo" }));
    }
    hub.repositories.insert(id.clone(), body["private"] == true);
    (200, json!({ "url": format!("{endpoint}/{id}") }))
}

/// As the hub does: what is no text goes to the store for large files.
fn preupload(body: &Value) -> (u16, Value) {
    let files = body["files"].as_array().unwrap().iter().map(|file| {
        assert!(file["size"].is_u64() && file["sample"].is_string(), "{file}");
        let path = file["path"].as_str().unwrap();
        let mode = if path.ends_with(".safetensors") { "lfs" } else { "regular" };
        json!({ "path": path, "uploadMode": mode, "shouldIgnore": false })
    });
    (200, json!({ "files": files.collect::<Vec<_>>() }))
}

fn batch(hub: &Pushes, body: &Value, store: &str) -> (u16, Value) {
    assert_eq!((&body["operation"], &body["hash_algo"]), (&json!("upload"), &json!("sha256")));
    let objects = body["objects"].as_array().unwrap().iter().map(|object| {
        let oid = object["oid"].as_str().unwrap();
        if hub.large.contains_key(oid) {
            return json!({ "oid": oid, "size": object["size"] });
        }
        let href = format!("{store}/store/{oid}");
        json!({ "oid": oid, "size": object["size"], "actions": { "upload": { "href": href, "header": {} } } })
    });
    (200, json!({ "transfer": "basic", "objects": objects.collect::<Vec<_>>() }))
}

fn commit(hub: &mut Pushes, id: &str, request: &Request) -> (u16, Value) {
    assert_eq!(request.content, "application/x-ndjson");
    let text = String::from_utf8(request.body.clone()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in lines.iter().filter(|line| line["key"] == "lfsFile") {
        let oid = line["value"]["oid"].as_str().unwrap();
        if hub
            .large
            .get(oid)
            .is_none_or(|bytes| bytes.len() as u64 != line["value"]["size"].as_u64().unwrap())
        {
            return (
                400,
                json!({ "error": format!("LFS pointer {oid} points to a file that does not exist") }),
            );
        }
    }
    hub.commits.push((id.to_owned(), lines));
    (200, json!({ "success": true, "commitOid": "607a30d783dfa663caf39e06633721c8d4cfcd7e" }))
}
