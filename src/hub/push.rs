//! Uploads files to a repository of the hub in one commit.
//!
//! The requests are those of huggingface_hub: make the repository, ask which files belong into the large-file store,
//! put those there (the LFS batch protocol), then commit all. What the store has already is not sent again, so a push
//! that was cut goes on where it stopped.

use std::{io::Read, thread};

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use ureq::{
    Body, RequestExt,
    http::{Request, Response, Uri, header},
};

use super::{
    HubOptions, MAIN,
    client::{Client, WAITS, reason},
};
use crate::error::{Error, Result};

/// A file to upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// Its path in the repository.
    pub path: String,
    /// Content of the file.
    pub bytes: Vec<u8>,
}

/// What to push, and where to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push<'a> {
    /// Id of the repository, `owner/name`.
    pub id: &'a str,
    /// The files of the commit; others in the repository stay.
    pub files: &'a [Upload],
    /// First line of the commit's message.
    pub message: &'a str,
    /// Whether a new repository is for its owner alone.
    pub private: bool,
}

/// A push that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Address of the repository.
    pub address: String,
    /// Whether the repository is new.
    pub is_new: bool,
    /// Id of the commit, where the hub tells it.
    pub commit: Option<String>,
}

/// Bytes of a file that the hub looks at to choose where it is kept.
const SAMPLE: usize = 512;
/// Longest part of an answer that is read.
const LONGEST_ANSWER: u64 = 16 << 20;

/// Pushes files to the main branch of a repository, which is made if need be; `progress` hears what is sent.
///
/// # Errors
/// [`Error::Input`] without a token or the right to write, [`Error::Failed`] when the network fails.
pub fn push(push: &Push, options: &HubOptions, progress: &dyn Fn(&str)) -> Result<Pushed> {
    if options.token.is_none() {
        return Err(Error::input(format!(
            "{}: there is no token to push with; set HF_TOKEN to one that may write, or log in with `hf auth login`",
            push.id
        )));
    }
    if options.offline {
        return Err(Error::input(format!(
            "{}: nothing can be pushed offline; leave --offline out and unset HF_HUB_OFFLINE",
            push.id
        )));
    }
    let hub = Pusher { client: Client::new(options)?, id: push.id };
    let is_new = hub.make_repository(push.private)?;
    let is_large = hub.large_files(push.files)?;
    let large: Vec<Large> = push
        .files
        .iter()
        .zip(&is_large)
        .filter(|(_, large)| **large)
        .map(|(file, _)| Large { file, oid: hex(digest(&SHA256, &file.bytes).as_ref()) })
        .collect();
    hub.store(&large, progress)?;
    let commit = hub.commit(push, &large)?;
    Ok(Pushed { address: hub.client.address(push.id), is_new, commit })
}

/// A file for the large-file store, with its SHA-256.
struct Large<'a> {
    file: &'a Upload,
    oid: String,
}

struct Pusher<'a> {
    client: Client,
    id: &'a str,
}

/// The answer to a request: its status and its JSON, null where it has none.
struct Reply {
    status: u16,
    json: Value,
    /// The server's word for what is wrong.
    message: Option<String>,
}

impl Pusher<'_> {
    /// Makes the repository; returns whether it is new.
    fn make_repository(&self, private: bool) -> Result<bool> {
        let (owner, name) = self.id.split_once('/').unwrap_or(("", self.id));
        let mut body = json!({ "name": name, "type": "model", "private": private });
        if !owner.is_empty() {
            body["organization"] = json!(owner);
        }
        let reply = self.post("api/repos/create", "application/json", body.to_string().as_bytes())?;
        match reply.status {
            200..=299 => Ok(true),
            409 => Ok(false),
            // Without the right to make one, there may be the right to write to one that is there.
            403 if self.get(&format!("api/models/{}", self.id))?.status == 200 => Ok(false),
            _ => Err(self.refused("make the repository", &reply)),
        }
    }

    /// Which files the hub wants in the large-file store.
    fn large_files(&self, files: &[Upload]) -> Result<Vec<bool>> {
        let described = files.iter().map(|file| {
            let sample = &file.bytes[..file.bytes.len().min(SAMPLE)];
            json!({ "path": file.path, "size": file.bytes.len(), "sample": STANDARD.encode(sample) })
        });
        let body = json!({ "files": described.collect::<Vec<_>>() }).to_string();
        let path = format!("api/models/{}/preupload/{MAIN}", self.id);
        let reply = self.post(&path, "application/json", body.as_bytes())?;
        let answers = reply.json["files"].as_array().filter(|_| reply.is_success());
        let Some(answers) = answers else { return Err(self.refused("take the files", &reply)) };
        let is_large = |file: &Upload| {
            answers.iter().any(|answer| answer["path"] == file.path.as_str() && answer["uploadMode"] == "lfs")
        };
        Ok(files.iter().map(is_large).collect())
    }

    /// Puts files into the large-file store, less those that it has.
    fn store(&self, large: &[Large], progress: &dyn Fn(&str)) -> Result<()> {
        if large.is_empty() {
            return Ok(());
        }
        let objects = large.iter().map(|it| json!({ "oid": it.oid, "size": it.file.bytes.len() }));
        let body = json!({
            "operation": "upload", "transfers": ["basic"], "hash_algo": "sha256",
            "ref": { "name": MAIN }, "objects": objects.collect::<Vec<_>>(),
        });
        let path = format!("{}.git/info/lfs/objects/batch", self.id);
        let reply = self.post(&path, LFS, body.to_string().as_bytes())?;
        let answers = reply.json["objects"].as_array().filter(|_| reply.is_success());
        let Some(answers) = answers else { return Err(self.refused("take the large files", &reply)) };
        for it in large {
            let answer =
                answers.iter().find(|answer| answer["oid"] == it.oid.as_str()).unwrap_or(&Value::Null);
            if let Some(why) = answer["error"]["message"].as_str() {
                return Err(Error::failed(format!("{}: the hub refuses {}: {why}", self.id, it.file.path)));
            }
            // Without actions the store has the file.
            if let Some(upload) = answer["actions"].get("upload") {
                progress(&it.file.path);
                self.put(upload, it)?;
                if let Some(verify) = answer["actions"].get("verify") {
                    self.verify(verify, it)?;
                }
            }
        }
        Ok(())
    }

    /// Sends a file to the address of an LFS action.
    fn put(&self, action: &Value, it: &Large) -> Result<()> {
        let reply = self.send("PUT", &self.href(action, it)?, &headers(action), &it.file.bytes)?;
        if reply.is_success() {
            Ok(())
        } else {
            Err(self.refused(&format!("store {}", it.file.path), &reply))
        }
    }

    fn verify(&self, action: &Value, it: &Large) -> Result<()> {
        let body = json!({ "oid": it.oid, "size": it.file.bytes.len() }).to_string();
        let mut headers = headers(action);
        headers.push((header::CONTENT_TYPE.to_string(), LFS.to_owned()));
        let reply = self.send("POST", &self.href(action, it)?, &headers, body.as_bytes())?;
        if reply.is_success() {
            Ok(())
        } else {
            Err(self.refused(&format!("check {}", it.file.path), &reply))
        }
    }

    fn href(&self, action: &Value, it: &Large) -> Result<String> {
        let address = action["href"].as_str().map(str::to_owned);
        address.ok_or_else(|| {
            Error::failed(format!(
                "{}: the hub names no address for {}; try again later",
                self.id, it.file.path
            ))
        })
    }

    /// Commits all files; returns the commit's id.
    fn commit(&self, push: &Push, large: &[Large]) -> Result<Option<String>> {
        let mut lines =
            vec![json!({ "key": "header", "value": { "summary": push.message, "description": "" } })];
        for file in push.files {
            lines.push(match large.iter().find(|it| it.file.path == file.path) {
                Some(Large { oid, .. }) => json!({
                    "key": "lfsFile",
                    "value": { "path": file.path, "algo": "sha256", "oid": oid, "size": file.bytes.len() },
                }),
                None => json!({
                    "key": "file",
                    "value": {
                        "path": file.path, "content": STANDARD.encode(&file.bytes), "encoding": "base64",
                    },
                }),
            });
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let path = format!("api/models/{}/commit/{MAIN}", self.id);
        let reply = self.post(&path, "application/x-ndjson", body.as_bytes())?;
        if !reply.is_success() {
            return Err(self.refused("take the commit", &reply));
        }
        Ok(reply.json["commitOid"].as_str().map(str::to_owned))
    }

    fn post(&self, path: &str, content: &str, body: &[u8]) -> Result<Reply> {
        let headers = [
            (header::CONTENT_TYPE.to_string(), content.to_owned()),
            (header::ACCEPT.to_string(), accepted(content)),
        ];
        self.send("POST", &self.client.address(path), &headers, body)
    }

    fn get(&self, path: &str) -> Result<Reply> {
        self.send("GET", &self.client.address(path), &[], &[])
    }

    /// Sends a request until it is answered. A failure while a commit is sent is not tried again: it may have arrived.
    fn send(&self, method: &str, address: &str, headers: &[(String, String)], body: &[u8]) -> Result<Reply> {
        let uri: Uri = address.parse().map_err(|_| self.cut("its address cannot be used"))?;
        let may_repeat = !address.contains("/commit/");
        let mut waits = WAITS.iter().filter(|_| may_repeat);
        loop {
            let mut request = Request::builder().method(method).uri(uri.clone());
            for (name, value) in headers {
                request = request.header(name, value);
            }
            // No store may see the token.
            if let Some(token) = self.client.token_for(&uri) {
                request = request.header(header::AUTHORIZATION, token);
            }
            let request = request.body(body).map_err(|cause| self.cut(&cause.to_string()))?;
            let answer = request.with_agent(self.client.agent(&uri)).run();
            let may_pass = match &answer {
                Ok(response) => matches!(response.status().as_u16(), 429 | 500 | 502..=504),
                Err(_) => true,
            };
            match (waits.next().filter(|_| may_pass), answer) {
                (Some(wait), _) => thread::sleep(*wait),
                (None, Ok(response)) => return Ok(Reply::read(response)),
                (None, Err(failure)) => return Err(self.cut(&reason(&failure))),
            }
        }
    }

    fn cut(&self, cause: &str) -> Error {
        Error::failed(format!(
            "{}: the push was cut: {cause}; run the command again to go on from there",
            self.id
        ))
    }

    fn refused(&self, what: &str, reply: &Reply) -> Error {
        let id = self.id;
        let why = reply.message.as_ref().map_or(String::new(), |message| format!(" ({message})"));
        match reply.status {
            401 => Error::input(format!(
                "{id}: the hub refuses the token{why}; set HF_TOKEN to a valid token that may write"
            )),
            403 => Error::input(format!(
                "{id}: the token in use may not {what}{why}; set HF_TOKEN to one that may write there, or name another \
                 owner"
            )),
            404 => {
                Error::input(format!("{id}: the hub knows no such owner or repository{why}; check the id"))
            }
            400 | 422 => {
                Error::input(format!("{id}: the hub does not {what}{why}; correct the folder or the id"))
            }
            status => Error::failed(format!(
                "{id}: the hub answered {status} instead of to {what}{why}; try again later"
            )),
        }
    }
}

/// The type of LFS requests and answers.
const LFS: &str = "application/vnd.git-lfs+json";

fn accepted(content: &str) -> String {
    if content == LFS { LFS } else { "application/json" }.to_owned()
}

/// The headers that an LFS action asks for.
fn headers(action: &Value) -> Vec<(String, String)> {
    let fields = action["header"].as_object().into_iter().flatten();
    fields.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

impl Reply {
    fn read(response: Response<Body>) -> Self {
        let status = response.status().as_u16();
        let header = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
        let header = header.map(str::to_owned);
        let mut text = Vec::new();
        let mut body = response.into_body();
        let read = body.as_reader().take(LONGEST_ANSWER).read_to_end(&mut text);
        let json: Value = read.ok().and_then(|_| serde_json::from_slice(&text).ok()).unwrap_or_default();
        let message = header.or_else(|| json["error"].as_str().map(str::to_owned));
        Self { status, json, message }
    }

    fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_sha256() {
        // FIPS 180-2, appendix B.1
        let wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(digest(&SHA256, b"abc").as_ref()), wanted);
    }

    #[test]
    fn nothing_is_sent_without_a_token() {
        let files = [Upload { path: "a".into(), bytes: b"a".to_vec() }];
        let push_it = Push { id: "o/n", files: &files, message: "m", private: false };
        let error = push(&push_it, &HubOptions::default(), &|_| {}).unwrap_err();
        assert!(error.to_string().contains("HF_TOKEN") && error.exit_code() == 2);
        let offline = HubOptions { token: Some("t".into()), offline: true, ..HubOptions::default() };
        let error = push(&push_it, &offline, &|_| {}).unwrap_err();
        assert!(error.to_string().contains("HF_HUB_OFFLINE"));
    }
}
