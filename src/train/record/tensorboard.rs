//! TensorBoard's event files, written by hand: a handful of protobuf fields in a simple framing.
//!
//! A file is a sequence of records (TensorFlow's `record_writer.cc`), little-endian: the length as u64, its masked
//! checksum as u32, the bytes, their masked checksum. A checksum is CRC-32C, rotated right by 15 bits, plus
//! 0xa282ead8. A record is an `Event` (`event.proto`); the first one names the version of the format.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crc::{CRC_32_ISCSI, Crc};

use super::appender::Appender;

/// CRC-32C goes by this name in the catalogue of checksums.
const CHECKSUM: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Begins the names of event files; TensorBoard looks for `tfevents`.
const PREFIX: &str = "events.out.tfevents.";

/// The event files of a run: one for each process that trained it.
#[derive(Debug)]
pub struct EventFile {
    file: Appender,
}

impl EventFile {
    /// A new event file in `folder`, which TensorBoard reads after those that are there: it takes them in the order of
    /// their names. With `purge`, what they say of that step and later ones no longer counts.
    ///
    /// # Errors
    /// Those of the system.
    pub fn create(folder: &Path, time: f64, purge: Option<u64>) -> io::Result<Self> {
        let path = next_path(folder, time)?;
        let mut file = Self { file: Appender::open(&path, 0)? };
        file.append(&event(time, 0, &Content::Version))?;
        if let Some(step) = purge {
            file.append(&event(time, step, &Content::SessionStart))?;
        }
        Ok(file)
    }

    /// The event file in `folder` that TensorBoard reads last, to add to it.
    ///
    /// # Errors
    /// Those of the system.
    pub fn newest(folder: &Path) -> io::Result<Option<Self>> {
        let newest = last_numbers(folder)?.map(|numbers| Appender::open(&path_of(folder, numbers), u64::MAX));
        newest.transpose().map(|file| file.map(|file| Self { file }))
    }

    /// Appends scalars of a step, each a tag and its value.
    ///
    /// # Errors
    /// Those of the system.
    pub fn scalars(&mut self, time: f64, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        self.append(&event(time, step, &Content::Scalars(values)))
    }

    /// Appends a text.
    ///
    /// # Errors
    /// Those of the system.
    pub fn text(&mut self, time: f64, step: u64, tag: &str, text: &str) -> io::Result<()> {
        self.append(&event(time, step, &Content::Text(tag, text)))
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    fn append(&mut self, event: &[u8]) -> io::Result<()> {
        self.file.append(&framed(event))
    }
}

/// Whether a file in a run folder is one of these, by its name.
pub fn is_event_file(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The path of an event file after every one in `folder`, also if the clock went back.
fn next_path(folder: &Path, time: f64) -> io::Result<PathBuf> {
    let now = time as u64;
    Ok(match last_numbers(folder)? {
        Some((seconds, number)) if seconds >= now => path_of(folder, (seconds, number + 1)),
        _ => path_of(folder, (now, 0)),
    })
}

/// `events.out.tfevents.SECONDS.engraft.NUMBER`.
fn path_of(folder: &Path, (seconds, number): (u64, u64)) -> PathBuf {
    folder.join(format!("{PREFIX}{seconds:010}.engraft.{number:04}"))
}

/// Seconds and number of the last event file in `folder`.
fn last_numbers(folder: &Path) -> io::Result<Option<(u64, u64)>> {
    let mut last = None;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let parts = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once(".engraft."));
        let numbers = parts
            .and_then(|(seconds, number)| Some((seconds.parse::<u64>().ok()?, number.parse::<u64>().ok()?)));
        last = last.max(numbers);
    }
    Ok(last)
}

/// What an event says.
enum Content<'a> {
    /// The version of the format, at the beginning of a file.
    Version,
    /// A process begins: what earlier files say of this step and later ones is void.
    SessionStart,
    Scalars(&'a [(&'a str, f64)]),
    Text(&'a str, &'a str),
}

/// An `Event`: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7.
fn event(time: f64, step: u64, content: &Content) -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, time);
    event.varint(2, step);
    match content {
        Content::Version => event.bytes(3, b"brain.Event:2"),
        Content::Scalars(values) => {
            let mut summary = Message::default();
            values.iter().for_each(|(tag, value)| summary.bytes(1, &scalar(tag, *value)));
            event.bytes(5, &summary.0);
        }
        Content::Text(tag, text) => {
            let mut summary = Message::default();
            summary.bytes(1, &text_value(tag, text));
            event.bytes(5, &summary.0);
        }
        Content::SessionStart => {
            let mut log = Message::default();
            log.varint(1, 1); // status = START
            event.bytes(7, &log.0);
        }
    }
    event.0
}

/// A `Summary.Value`: tag = 1, simple_value = 2.
fn scalar(tag: &str, value: f64) -> Vec<u8> {
    let mut message = Message::default();
    message.bytes(1, tag.as_bytes());
    message.float(2, value as f32);
    message.0
}

/// A `Summary.Value` of the text plugin: tag = 1, tensor = 8 (dtype = 1 of DT_STRING = 7, shape = 2, string_val = 8),
/// metadata = 9 (plugin_data = 1 with plugin_name = 1).
fn text_value(tag: &str, text: &str) -> Vec<u8> {
    let (mut size, mut shape) = (Message::default(), Message::default());
    size.varint(1, 1);
    shape.bytes(2, &size.0);
    let mut tensor = Message::default();
    tensor.varint(1, 7);
    tensor.bytes(2, &shape.0);
    tensor.bytes(8, text.as_bytes());
    let (mut plugin, mut metadata) = (Message::default(), Message::default());
    plugin.bytes(1, b"text");
    metadata.bytes(1, &plugin.0);
    let mut message = Message::default();
    message.bytes(1, tag.as_bytes());
    message.bytes(8, &tensor.0);
    message.bytes(9, &metadata.0);
    message.0
}

/// A protobuf message: fields in ascending order, zeros left out.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u64, value: u64) {
        if value != 0 {
            self.raw(field << 3);
            self.raw(value);
        }
    }

    fn double(&mut self, field: u64, value: f64) {
        self.raw(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.raw(field << 3 | 2);
        self.raw(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.raw(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    /// Seven bits a byte, lowest first; the highest bit says that more follow.
    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// `record` with its length and both checksums.
fn framed(record: &[u8]) -> Vec<u8> {
    let length = (record.len() as u64).to_le_bytes();
    [&length[..], &masked(&length).to_le_bytes(), record, &masked(record).to_le_bytes()].concat()
}

fn masked(bytes: &[u8]) -> u32 {
    CHECKSUM.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
#[path = "tensorboard_tests.rs"]
mod tests;
