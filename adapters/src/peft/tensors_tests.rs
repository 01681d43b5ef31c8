//! Tests of the container: one hostile file per rule, written by hand, and a round trip.

use std::{collections::HashMap, fs, path::Path};

use super::{Outgoing, TensorFile, write};
use crate::Error;

/// A file of a header and so many bytes of tensors.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn open(bytes: &[u8]) -> Result<TensorFile, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    fs::write(&path, bytes).unwrap();
    TensorFile::open(&path)
}

fn one(dtype: &str, shape: &str, offsets: &str, data: usize) -> Vec<u8> {
    let header = format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
    file(&header, &vec![0; data])
}

#[test]
fn hostile_files_are_errors_that_name_the_file_and_the_rule() {
    let two = |second: &str| {
        let header = format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"b":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#
        );
        file(&header, &[0; 16])
    };
    let hostile: [(&str, Vec<u8>); 17] = [
        ("empty", vec![]),
        ("shorter than the length", vec![1, 2, 3]),
        ("header longer than the file", file("{}", &[])[..9].to_vec()),
        ("header of 2^64 - 1 bytes", [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat()),
        ("header over the limit", [(1u64 << 40).to_le_bytes().as_slice(), b"{}"].concat()),
        ("no JSON", file("{nonsense", &[])),
        ("no object", file("[1, 2]", &[])),
        ("no UTF-8", file("{\"", &[]).into_iter().chain([0xff, 0xfe]).collect()),
        ("data cut off", one("F32", "[2,2]", "[0,16]", 12)),
        ("data too long", one("F32", "[2,2]", "[0,16]", 20)),
        ("overlap", two("[4,12]")),
        ("hole", two("[12,20]")),
        ("end before begin", one("F32", "[1]", "[4,0]", 4)),
        ("shape and offsets disagree", one("F32", "[3]", "[0,16]", 16)),
        ("shape overflows", one("F32", "[4294967296,4294967296,4]", "[0,16]", 16)),
        ("offsets at the end of u64", one("F32", "[1]", "[0,18446744073709551615]", 4)),
        ("unknown type", one("F33", "[4]", "[0,16]", 16)),
    ];
    for (what, bytes) in hostile {
        let error = open(&bytes).expect_err(what);
        assert!(matches!(error, Error::SafeTensors { .. }), "{what}: {error}");
        assert!(error.is_input() && error.to_string().contains("adapter_model.safetensors"), "{what}");
    }
}

#[test]
fn every_truncation_and_every_flipped_byte_is_an_error_or_a_file() {
    let bytes = one("F32", "[2,2]", "[0,16]", 16);
    for end in 0..bytes.len() {
        assert!(open(&bytes[..end]).is_err(), "{end}");
    }
    for at in 0..bytes.len() - 16 {
        for flip in [1, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= flip;
            if let Ok(mut file) = open(&bytes) {
                drop(file.read("t"));
            }
        }
    }
}

/// A file of a terabyte without content: what is allocated follows the header, not the length.
#[test]
fn a_huge_sparse_file_is_refused_without_reading_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse");
    let sparse = fs::File::create(&path).unwrap();
    if sparse.set_len(1 << 40).is_err() {
        return; // this file system has no files of that length
    }
    assert!(matches!(TensorFile::open(&path), Err(Error::SafeTensors { .. })));
}

#[test]
fn narrow_types_are_widened_and_others_left_alone() {
    let header = r#"{"bf":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"f":{"dtype":"F16","shape":[2],"data_offsets":[4,8]},"i":{"dtype":"I32","shape":[1],"data_offsets":[8,12]}}"#;
    let data = [0xc0, 0x3f, 0x00, 0xc0, 0x00, 0x3e, 0x00, 0xc0, 1, 0, 0, 0];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, file(header, &data)).unwrap();
    let mut tensors = TensorFile::open(&path).unwrap();
    assert_eq!(tensors.read("bf").unwrap().unwrap(), [1.5, -2.0]);
    assert_eq!(tensors.read("f").unwrap().unwrap(), [1.5, -2.0]);
    assert_eq!(tensors.read("i").unwrap(), None);
    assert_eq!(tensors.read("none").unwrap(), None);
}

fn written(path: &Path) {
    let tensor = |name: &str, shape: Vec<usize>, from: f32| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i| from + i as f32).collect();
        Outgoing { name: name.to_owned(), shape, values: Box::new(move || values.clone().into()) }
    };
    let tensors = [tensor("b", vec![3, 1], 0.5), tensor("a", vec![70, 71], -9.0)];
    let metadata = HashMap::from([
        ("format".to_owned(), "pt".to_owned()),
        ("with \"quotes\"".to_owned(), "and\nlines".to_owned()),
    ]);
    let mut bytes = Vec::new();
    write(&mut bytes, &tensors, &metadata).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn what_is_written_is_read_here_and_by_the_format_s_own_crate() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    written(&path);
    let bytes = fs::read(&path).unwrap();
    written(&path);
    assert_eq!(fs::read(&path).unwrap(), bytes, "the same tensors give the same bytes");
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.tensor("a").unwrap().shape(), [70, 71]);
    let (length, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(length % 8, 0);
    assert_eq!(header.metadata().as_ref().unwrap()["with \"quotes\""], "and\nlines");
    let mut ours = TensorFile::open(&path).unwrap();
    assert_eq!(ours.metadata("format"), Some("pt"));
    assert_eq!(ours.read("b").unwrap().unwrap(), [0.5, 1.5, 2.5]);
    let a = ours.read("a").unwrap().unwrap();
    assert_eq!((a.len(), a[0], a[4969]), (4970, -9.0, 4960.0));
}
