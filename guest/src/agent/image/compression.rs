//! What a layer is compressed with, found from its first bytes.

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};
use std::io::{self, BufRead, BufReader, Cursor, Read};

const BUFFER: usize = 64 << 10;

/// Most memory for a dictionary, in KiB: what `xz -9` needs, doubled. A builder has little more.
const MAX_DICTIONARY_KIB: u32 = 128 << 10;

/// The plain bytes of what may be compressed, all of its parts one after the other.
pub(super) fn plain<'a>(mut from: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut magic = [0; 6];
    let mut length: usize = 0;
    // Where less comes there is nothing to recognise.
    while let n @ 1.. = from.read(magic.get_mut(length..).unwrap_or_default())? {
        length = length.saturating_add(n);
    }
    let magic = magic.get(..length).unwrap_or_default().to_vec();
    let whole = BufReader::with_capacity(BUFFER, Cursor::new(magic.clone()).chain(from));
    Ok(match magic.as_slice() {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(whole)),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Box::new(XzReader::new_mem_limit(whole, true, MAX_DICTIONARY_KIB)),
        // A frame, or one to skip.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Box::new(Zstd::new(whole)),
        [b'B', b'Z', b'h', ..] => return Err(io::Error::other("it is compressed with bzip2: use gzip, zstd or xz")),
        _ => Box::new(whole),
    })
}

/// zstd frames, one after the other; the decoder takes one.
struct Zstd<R: BufRead> {
    from: R,
    decoder: FrameDecoder,
    within: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(from: R) -> Self {
        Self { from, decoder: FrameDecoder::new(), within: false }
    }

    /// Begins the next frame; false where there is none.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.from.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.from) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    let length = u64::from(length);
                    if io::copy(&mut (&mut self.from).take(length), &mut io::sink())? != length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(format!("zstd: {error}"))),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within {
                self.within = self.begin()?;
                if !self.within {
                    return Ok(0);
                }
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.from, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| io::Error::other(format!("zstd: {error}")))?;
            }
            let n = self.decoder.read(buffer)?;
            if n > 0 || buffer.is_empty() {
                return Ok(n);
            }
            let said = self.decoder.get_checksum_from_data();
            if said.is_some() && said != self.decoder.get_calculated_checksum() {
                return Err(io::Error::other("zstd: a wrong checksum"));
            }
            self.within = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn compressed(program: &str, arguments: &[&str], content: &[u8]) -> Vec<u8> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, content).unwrap();
        let output =
            Command::new(program).args(arguments).stdin(file.reopen().unwrap()).stdout(Stdio::piped()).output();
        let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
        assert!(output.status.success());
        output.stdout
    }

    fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        plain(bytes)?.read_to_end(&mut content)?;
        Ok(content)
    }

    #[test]
    fn every_kind_in_parts_too_and_damage_is_noticed() {
        let content: Vec<u8> = (0..300_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        for (program, arguments) in [("gzip", &["-c"][..]), ("xz", &["-c"]), ("zstd", &["-c", "--check"])] {
            let one = compressed(program, arguments, &content);
            assert_eq!(read(&one).unwrap(), content, "{program}");
            assert_eq!(read(&[&one[..], &one].concat()).unwrap().len(), 2 * content.len(), "{program}");
            assert!(read(&one[..one.len() - 1]).is_err(), "{program}: cut");
            for at in [one.len() / 2, one.len() - 6] {
                let mut damaged = one.clone();
                damaged[at] ^= 0x10;
                assert!(read(&damaged).is_err(), "{program}: damaged at {at}");
            }
        }
        let frame = compressed("zstd", &["-c"], &content);
        let skipped = [&b"\x50\x2a\x4d\x18\x03\0\0\0abc"[..], &frame, b"\x51\x2a\x4d\x18\0\0\0\0"].concat();
        assert_eq!(read(&skipped).unwrap(), content);
        assert_eq!(read(&content).unwrap(), content);
        assert_eq!(read(b"").unwrap(), b"");
        assert_eq!(read(b"\x1f").unwrap(), b"\x1f");
        assert!(read(b"BZh91AY").is_err());
    }
}
