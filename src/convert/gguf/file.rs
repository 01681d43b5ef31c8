//! The container GGUF, version 3: metadata and descriptions of tensors first, then their bytes, each at a multiple of 32.
//!
//! The layout is that of `docs/gguf.md` of the project ggml. Sizes stand innermost first, unlike in our shapes.

use std::io::{self, Write};

use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor},
};
use half::f16;

/// Where tensors begin: the format's own default.
const ALIGNMENT: usize = 32;
/// Weights of a row that share a scale in Q8_0 and Q4_0.
const BLOCK: usize = 32;

/// Element type of a tensor in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// IEEE single precision: 24 significant bits.
    F32,
    /// IEEE half precision: 11 significant bits, at most 65504.
    F16,
    /// 8-bit codes, 32 of a row with an FP16 scale.
    Q8_0,
    /// 4-bit codes, 32 of a row with an FP16 scale.
    Q4_0,
}

impl GgufType {
    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// Number of the type in a description of a tensor.
    fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Q4_0 => 2,
        }
    }

    /// `general.file_type`: the type of most tensors.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Q4_0 => 2,
        }
    }

    /// Whether its elements are codes with scales.
    pub(super) fn is_coded(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0)
    }

    /// This type, or F16 where rows of `width` elements have no whole blocks.
    pub(super) fn of_rows(self, width: usize) -> Self {
        if self.is_coded() && !width.is_multiple_of(BLOCK) { Self::F16 } else { self }
    }

    /// Bytes of `elements` elements.
    fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => 4 * elements,
            Self::F16 => 2 * elements,
            Self::Q8_0 => elements / BLOCK * (2 + BLOCK),
            Self::Q4_0 => elements / BLOCK * (2 + BLOCK / 2),
        }
    }

    /// `values` in this type, little-endian.
    ///
    /// # Errors
    /// The first value that the type cannot hold.
    pub(super) fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        let beyond = |value: &&f32| match self {
            Self::F32 => !value.is_finite(),
            // The scale of a block is its largest weight over 127.
            Self::Q8_0 => !f16::from_f32(**value / 127.0).is_finite(),
            // Here over -8.
            Self::Q4_0 => !f16::from_f32(**value / 8.0).is_finite(),
            Self::F16 => !f16::from_f32(**value).is_finite(),
        };
        if let Some(value) = values.iter().find(beyond) {
            return Err(*value);
        }
        Ok(match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            Self::Q8_0 | Self::Q4_0 => {
                let dtype = if self == Self::Q8_0 { GgmlDType::Q8_0 } else { GgmlDType::Q4_0 };
                let quantized = Tensor::from_slice(values, values.len(), &Device::Cpu)
                    .and_then(|tensor| QTensor::quantize(&tensor, dtype));
                // The lengths of rows were checked; nothing else can be wrong.
                let bytes = quantized.and_then(|tensor| Ok(tensor.data()?.into_owned()));
                bytes.map_err(|_| f32::NAN)?
            }
        })
    }
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<i32>),
}

impl From<&str> for Meta {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<usize> for Meta {
    /// Sizes of models are far below 2^32.
    fn from(number: usize) -> Self {
        Self::U32(u32::try_from(number).unwrap_or(u32::MAX))
    }
}

/// A tensor that a file describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    pub kind: GgufType,
}

impl Described {
    pub fn bytes(&self) -> usize {
        self.kind.bytes(self.shape.iter().product())
    }
}

/// What stands before the bytes of the tensors, padded.
pub(super) fn header(metadata: &[(String, Meta)], tensors: &[Described]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        push_text(&mut out, key);
        push_value(&mut out, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        push_text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|&size| (size as u64).to_le_bytes()));
        out.extend(tensor.kind.number().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT) as u64;
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

/// Writes the bytes of a tensor, padded to where the next one begins.
pub(super) fn write_tensor(out: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    out.write_all(&[0; ALIGNMENT][..bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()])
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The number of a value's type, and the value.
fn push_value(out: &mut Vec<u8>, value: &Meta) {
    const I32: u32 = 5;
    const TEXT: u32 = 8;
    const ARRAY: u32 = 9;
    let mut number = |number: u32| out.extend(number.to_le_bytes());
    match value {
        Meta::U32(value) => [4, *value].into_iter().for_each(number),
        Meta::F32(value) => [6, value.to_bits()].into_iter().for_each(number),
        Meta::Bool(value) => {
            number(7);
            out.push(u8::from(*value));
        }
        Meta::Text(text) => {
            number(TEXT);
            push_text(out, text);
        }
        Meta::Texts(texts) => {
            [ARRAY, TEXT].into_iter().for_each(number);
            out.extend((texts.len() as u64).to_le_bytes());
            texts.iter().for_each(|text| push_text(out, text));
        }
        Meta::Numbers(numbers) => {
            [ARRAY, I32].into_iter().for_each(number);
            out.extend((numbers.len() as u64).to_le_bytes());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use candle_core::quantized::gguf_file::{Content, Value};

    use super::*;

    #[test]
    fn candle_reads_what_is_written() {
        let metadata = [
            ("a.number".to_owned(), Meta::U32(7)),
            ("a.float".to_owned(), Meta::F32(1.5)),
            ("a.switch".to_owned(), Meta::Bool(true)),
            ("a.text".to_owned(), Meta::from("höher")),
            ("a.texts".to_owned(), Meta::Texts(vec!["x".into(), String::new()])),
            ("a.numbers".to_owned(), Meta::Numbers(vec![-1, 3])),
        ];
        let kinds = [GgufType::F32, GgufType::F16, GgufType::Q8_0, GgufType::Q4_0];
        let values: Vec<f32> = (0..3 * 64).map(|at| (at as f32 - 90.0) / 64.0).collect();
        let tensors: Vec<Described> = kinds
            .iter()
            .map(|&kind| Described { name: format!("t.{}", kind.name()), shape: vec![3, 64], kind })
            .chain([Described { name: "odd".into(), shape: vec![5], kind: GgufType::F16 }])
            .collect();
        let mut bytes = header(&metadata, &tensors);
        for tensor in &tensors {
            let values = &values[..tensor.shape.iter().product()];
            let encoded = tensor.kind.encode(values).unwrap();
            assert_eq!(encoded.len(), tensor.bytes());
            write_tensor(&mut bytes, &encoded).unwrap();
        }
        let mut file = Cursor::new(bytes);
        let content = Content::read(&mut file).unwrap();
        assert_eq!(content.metadata["a.number"].to_u32().unwrap(), 7);
        assert_eq!(content.metadata["a.float"].to_f32().unwrap(), 1.5);
        assert!(content.metadata["a.switch"].to_bool().unwrap());
        assert_eq!(content.metadata["a.text"].to_string().unwrap(), "höher");
        assert_eq!(content.metadata["a.texts"].to_vec().unwrap().len(), 2);
        assert!(matches!(
            content.metadata["a.numbers"].to_vec().unwrap()[..],
            [Value::I32(-1), Value::I32(3)]
        ));
        for (tensor, bound) in tensors.iter().zip([0.0, 1e-3, 6.2e-3, 0.11, 1e-3]) {
            let read = content.tensor(&mut file, &tensor.name, &Device::Cpu).unwrap();
            assert_eq!(read.shape().dims(), tensor.shape);
            let read =
                read.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            // Half a step of Q8_0 is 1.6 / 254. Q4_0 reaches from -8 to 7 steps of 1.6 / 8. FP16 has 11 bits.
            let error = read.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error <= bound, "{}: {error}", tensor.name);
        }
    }

    #[test]
    fn a_value_beyond_the_type_is_handed_back() {
        let mut values = vec![1.0; 32];
        values[7] = 7e4;
        assert_eq!(GgufType::F16.encode(&values), Err(7e4));
        assert!(GgufType::F32.encode(&values).is_ok() && GgufType::Q8_0.encode(&values).is_ok());
        values[7] = 9e6;
        assert_eq!(GgufType::Q8_0.encode(&values), Err(9e6));
        assert_eq!([GgufType::Q8_0, GgufType::Q4_0].map(|dtype| dtype.of_rows(48)), [GgufType::F16; 2]);
    }
}
