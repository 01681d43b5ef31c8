//! A reader of TensorBoard's event files for tests, with its own checksum: it shares nothing with the writer.

/// What is read of an event.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Event {
    pub time: f64,
    pub step: u64,
    /// Of the first event of a file.
    pub version: String,
    pub session_start: bool,
    pub scalars: Vec<(String, f32)>,
}

/// All events of a file; fails at the first byte that is not right.
pub fn read(mut file: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while !file.is_empty() {
        let (header, rest) = file.split_at(12);
        let length = u64::from_le_bytes(header[..8].try_into().unwrap());
        assert_eq!(masked(&header[..8]), u32::from_le_bytes(header[8..].try_into().unwrap()), "length");
        let (record, rest) = rest.split_at(usize::try_from(length).unwrap());
        let (checksum, rest) = rest.split_at(4);
        assert_eq!(masked(record), u32::from_le_bytes(checksum.try_into().unwrap()), "record");
        events.push(event(record));
        file = rest;
    }
    events
}

/// CRC-32C bit by bit (polynomial 0x1EDC6F41, reflected), rotated and shifted as TensorFlow does.
fn masked(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The value of a field.
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl Value<'_> {
    fn number(&self) -> u64 {
        match self {
            Value::Number(number) => *number,
            Value::Bytes(_) => panic!("bytes where a number should be"),
        }
    }

    fn text(&self) -> String {
        match self {
            Value::Bytes(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
            Value::Number(_) => panic!("a number where text should be"),
        }
    }

    fn fields(&self) -> Vec<(u64, Value<'_>)> {
        match self {
            Value::Bytes(bytes) => fields(bytes),
            Value::Number(_) => panic!("a number where a message should be"),
        }
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let (first, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        shift += 7;
        if first & 0x80 == 0 {
            return value;
        }
    }
}

/// The fields of a protobuf message, each with its number.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Value<'_>)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Value::Number(varint(&mut bytes)),
            1 | 5 => {
                let (number, rest) = bytes.split_at(if key & 7 == 1 { 8 } else { 4 });
                bytes = rest;
                let mut eight = [0; 8];
                eight[..number.len()].copy_from_slice(number);
                Value::Number(u64::from_le_bytes(eight))
            }
            2 => {
                let length = varint(&mut bytes) as usize;
                let (inside, rest) = bytes.split_at(length);
                bytes = rest;
                Value::Bytes(inside)
            }
            other => panic!("wire type {other}"),
        };
        found.push((key >> 3, value));
    }
    found
}

fn event(record: &[u8]) -> Event {
    let mut event = Event::default();
    for (field, value) in fields(record) {
        match field {
            1 => event.time = f64::from_bits(value.number()),
            2 => event.step = value.number(),
            3 => event.version = value.text(),
            5 => event.scalars = value.fields().iter().filter_map(|(_, value)| scalar(value)).collect(),
            7 => {
                event.session_start = value.fields().iter().any(|(field, it)| *field == 1 && it.number() == 1)
            }
            other => panic!("field {other}"),
        }
    }
    event
}

/// Tag and value of a `Summary.Value` with a simple value.
fn scalar(value: &Value) -> Option<(String, f32)> {
    let fields = value.fields();
    let tag = fields.iter().find(|(field, _)| *field == 1).map(|(_, tag)| tag.text())?;
    let number = fields.iter().find(|(field, _)| *field == 2).map(|(_, number)| number.number())?;
    Some((tag, f32::from_bits(number as u32)))
}
