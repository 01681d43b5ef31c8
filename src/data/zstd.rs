//! Reads a .zst file: frames one after the other, as `zstd` and `pzstd` write them.

use std::io::{self, BufRead, BufReader, Read};

use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

/// The content of all frames of a file, whose checksums are compared where a frame has one.
pub(super) struct Zstd {
    from: BufReader<Box<dyn Read + Send>>,
    decoder: FrameDecoder,
    /// Whether a frame has begun whose end was not seen yet.
    inside: bool,
}

impl Zstd {
    /// The content of the file that `from` reads.
    pub(super) fn new(from: Box<dyn Read + Send>) -> Self {
        Self { from: BufReader::new(from), decoder: FrameDecoder::new(), inside: false }
    }

    /// Begins the next frame, or skips one that holds no data.
    fn begin(&mut self) -> io::Result<()> {
        match self.decoder.init(&mut self.from) {
            Ok(()) => self.inside = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => {
                let length = u64::from(length);
                if io::copy(&mut self.from.by_ref().take(length), &mut io::sink())? < length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(cause) => return Err(io::Error::other(cause)),
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.inside = false;
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(written), Some(found)) if written != found => {
                Err(io::Error::other("the checksum of a zstd frame does not match"))
            }
            _ => Ok(()),
        }
    }
}

impl Read for Zstd {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.inside {
                if self.from.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.begin()?;
            } else if self.decoder.can_collect() > 0 {
                return self.decoder.read(out);
            } else if self.decoder.is_finished() {
                self.end()?;
            } else {
                let wanted = BlockDecodingStrategy::UptoBytes(out.len());
                self.decoder.decode_blocks(&mut self.from, wanted).map_err(io::Error::other)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn content(bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut found = Vec::new();
        Zstd::new(Box::new(io::Cursor::new(bytes))).read_to_end(&mut found)?;
        Ok(found)
    }

    #[test]
    fn frames_are_joined_and_skippable_ones_left_out() {
        let text = "hello zstd, ".repeat(30_000);
        let frame = |text: &str| compress_to_vec(text.as_bytes(), CompressionLevel::Fastest);
        let skipped = [&0x184d_2a53u32.to_le_bytes()[..], &3u32.to_le_bytes(), b"abc"].concat();
        let whole = [frame(&text), skipped.clone(), frame("end"), skipped].concat();
        assert_eq!(content(whole.clone()).unwrap(), format!("{text}end").into_bytes());
        assert!(content(Vec::new()).unwrap().is_empty());
        assert!(content(whole[..whole.len() - 1].to_vec()).is_err(), "a skippable frame that is cut");
        assert!(content(frame(&text)[..40].to_vec()).is_err(), "a frame that is cut");
        assert!(content(b"no zstd at all".to_vec()).is_err());
    }
}
