//! The header of a safetensors file: read without believing a number in it, and written so that the same tensors give
//! the same bytes.
//!
//! The safetensors crate writes metadata in no stable order, and reads a file only as a whole.

use std::{
    collections::BTreeMap,
    io::{self, Read},
};

use ::safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde_json::{Map, Value};

/// Bytes of the length in front of the header.
pub const PREFIX: u64 = 8;

/// A header whose tensors cover the rest of its file exactly.
#[derive(Debug)]
pub struct Header {
    /// Names, types, shapes and places of the tensors, and the strings of the file.
    pub metadata: Metadata,
    /// Offset in the file of the first byte of the tensors.
    pub start: u64,
}

/// Why a header cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file cannot be read.
    #[error("{0}")]
    Read(io::Error),
    /// The file ends before the length of its header does.
    #[error("{size} bytes are too few for a header length")]
    Short {
        /// Size of the file in bytes.
        size: u64,
    },
    /// The header would be longer than the file or than the caller allows.
    #[error("the header claims {length} bytes, {rest} follow")]
    Length {
        /// Bytes that the header claims.
        length: u64,
        /// Size in bytes of the file after the length field.
        rest: u64,
    },
    /// The text is no header, or its tensors overlap, leave holes or have other sizes than their shapes.
    #[error("{0}")]
    Rule(serde_json::Error),
    /// The tensors take more or fewer bytes than the file has.
    #[error("the header describes {described} bytes of tensors, the file has {held}")]
    Data {
        /// Bytes of the tensors in the header.
        described: u64,
        /// Size in bytes of the file after the header.
        held: u64,
    },
}

impl Header {
    /// Reads the header of a file of `size` bytes, of `longest` bytes at most; nothing is allocated from a number that
    /// was not compared with both.
    ///
    /// # Errors
    /// When the file cannot be read or breaks a rule of the format.
    pub fn read(file: &mut dyn Read, size: u64, longest: u64) -> Result<Self, HeaderError> {
        let rest = size.checked_sub(PREFIX).ok_or(HeaderError::Short { size })?;
        let mut length = [0; PREFIX as usize];
        file.read_exact(&mut length).map_err(HeaderError::Read)?;
        let length = u64::from_le_bytes(length);
        if length > rest || length > longest {
            return Err(HeaderError::Length { length, rest });
        }
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(HeaderError::Read)?;
        let metadata: Metadata = serde_json::from_slice(&text).map_err(HeaderError::Rule)?;
        let (described, held) = (metadata.data_len() as u64, rest - length);
        if described != held {
            return Err(HeaderError::Data { described, held });
        }
        Ok(Self { metadata, start: PREFIX + length })
    }
}

/// A tensor of a header to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// How many bytes it takes.
    pub bytes: usize,
}

/// In which order a header names things. The bytes of tensors are in the order given, with either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Tensors as given, and type, shape, place of each, as the safetensors crate writes them.
    Given,
    /// Tensors, and what is said of each, by name.
    Names,
}

/// Length and text of the header of a file with `strings` and `tensors`, padded with spaces so that the bytes of the
/// tensors begin at a multiple of `align`.
///
/// # Errors
/// None that a name or a string could bring about.
pub fn header(
    strings: &BTreeMap<&str, &str>,
    tensors: &[Entry],
    order: Order,
    align: usize,
) -> io::Result<Vec<u8>> {
    let mut start = 0;
    let infos = tensors.iter().map(|Entry { name, dtype, shape, bytes }| {
        let data_offsets = (start, start + bytes);
        start += bytes;
        (name, TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets })
    });
    let mut text = format!("{{\"__metadata__\":{}", serde_json::to_string(strings)?);
    match order {
        Order::Given => {
            for (name, info) in infos {
                text += &format!(",{}:{}", serde_json::to_string(name)?, serde_json::to_string(&info)?);
            }
        }
        Order::Names => {
            let sorted: BTreeMap<_, _> = infos.collect();
            for (name, info) in sorted {
                let fields: Map<String, Value> = serde_json::from_value(serde_json::to_value(&info)?)?;
                let fields: BTreeMap<_, _> = fields.into_iter().collect();
                text += &format!(",{}:{}", serde_json::to_string(name)?, serde_json::to_string(&fields)?);
            }
        }
    }
    text.push('}');
    let prefix = PREFIX as usize;
    let padded = (prefix + text.len()).next_multiple_of(align) - prefix;
    text += &" ".repeat(padded - text.len());
    Ok([&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<Entry> {
        let entry = |name: &str, dtype, shape: &[usize], bytes| Entry {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            bytes,
        };
        vec![
            entry("values \"\u{e4}\"", Dtype::F32, &[2, 3], 24),
            entry("empty", Dtype::F16, &[0], 0),
            entry("codes", Dtype::U8, &[5], 5),
        ]
    }

    fn strings() -> BTreeMap<&'static str, &'static str> {
        [("z", "1"), ("a", "\n")].into()
    }

    #[test]
    fn the_order_given_is_the_text_of_the_crate_that_defines_the_format() {
        let written = header(&[("only", "one")].into(), &entries(), Order::Given, 8).unwrap();
        let mut start = 0;
        let infos = entries().into_iter().map(|Entry { name, dtype, shape, bytes }| {
            start += bytes;
            (name, TensorInfo { dtype, shape, data_offsets: (start - bytes, start) })
        });
        let strings = [("only".to_owned(), "one".to_owned())].into();
        let theirs = serde_json::to_vec(&Metadata::new(Some(strings), infos.collect()).unwrap()).unwrap();
        assert_eq!(written[8..][..theirs.len()], theirs);
        assert!(written[8 + theirs.len()..].iter().all(|&byte| byte == b' '));
    }

    #[test]
    fn what_is_written_is_read_in_both_orders_and_begins_where_it_should() {
        for (order, align) in [(Order::Given, 8), (Order::Names, 8), (Order::Given, 64)] {
            let mut file = header(&strings(), &entries(), order, align).unwrap();
            assert!(file.len().is_multiple_of(align));
            let start = file.len() as u64;
            file.extend([7; 29]);
            let read = Header::read(&mut &file[..], file.len() as u64, 1000).unwrap();
            assert_eq!(read.start, start);
            let metadata = read.metadata.metadata().as_ref().unwrap();
            assert_eq!((metadata["z"].as_str(), metadata["a"].as_str()), ("1", "\n"));
            assert_eq!(read.metadata.info("codes").unwrap().data_offsets, (24, 29));
            assert_eq!(read.metadata.info("values \"\u{e4}\"").unwrap().shape, [2, 3]);
            assert_eq!(::safetensors::SafeTensors::deserialize(&file).unwrap().len(), 3);
        }
        let sorted = header(&strings(), &entries()[2..], Order::Names, 8).unwrap();
        let text = String::from_utf8_lossy(&sorted[8..]).into_owned();
        let expected =
            r#"{"__metadata__":{"a":"\n","z":"1"},"codes":{"data_offsets":[0,5],"dtype":"U8","shape":[5]}}"#;
        assert_eq!(text.trim_end(), expected);
    }

    #[test]
    fn each_rule_that_a_file_breaks_is_told_apart() {
        let read =
            |bytes: &[u8], longest| Header::read(&mut { bytes }, bytes.len() as u64, longest).unwrap_err();
        let whole = [header(&strings(), &entries(), Order::Given, 8).unwrap(), vec![0; 29]].concat();
        assert!(matches!(read(&whole[..7], 1000), HeaderError::Short { size: 7 }));
        assert!(matches!(read(&whole, 20), HeaderError::Length { .. }));
        assert!(matches!(read(&whole[..30], 1000), HeaderError::Length { rest: 22, .. }));
        assert!(matches!(
            read(&whole[..whole.len() - 1], 1000),
            HeaderError::Data { described: 29, held: 28 }
        ));
        assert!(matches!(read(b"\x02\0\0\0\0\0\0\0[]", 1000), HeaderError::Rule(_)));
        let cut = Header::read(&mut &whole[..20], whole.len() as u64, 1000).unwrap_err();
        assert!(matches!(cut, HeaderError::Read(_)), "a file that became shorter: {cut}");
    }
}
