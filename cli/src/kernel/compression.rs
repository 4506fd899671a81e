//! The compressions that kernels, modules and packages come in, told apart by their first bytes.
//!
//! All of it is hostile input: output is bounded, and what is cut short or does not match its own checksum is an
//! error. The decoders are crates without C.

use std::io::{self, BufReader, Read};

/// Most memory that a decoder may take for its window, in KiB: kernels are packed with 128 MiB.
const MAX_WINDOW_KIB: u32 = 192 << 10;
/// Unpacked length of a block of the LZ4 format that the kernel's build writes; the last one may be shorter.
const LZ4_BLOCK: usize = 8 << 20;
/// Begins a file of that format.
const LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

/// Why something cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnpackError {
    /// A format without a decoder here.
    #[error("it is compressed with {0}, which is not supported; gzip, zstd, xz and lz4 are")]
    Unsupported(&'static str),
    /// Bytes that the format does not allow, or fewer than it needs.
    #[error("its {format} data is damaged or cut short: {error}")]
    Damaged {
        /// The format.
        format: &'static str,
        /// What the decoder said.
        error: io::Error,
    },
    /// More than there can be.
    #[error("it unpacks to more than {limit} bytes, which none does")]
    TooLarge {
        /// The bound.
        limit: u64,
    },
}

/// A compression, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    /// Anything else.
    None,
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
    /// The .xz format, filters included.
    Xz,
    /// The legacy LZ4 format, which is the one that the kernel's build uses.
    Lz4,
}

impl Compression {
    /// What begins so.
    pub(super) fn of(head: &[u8]) -> Result<Self, UnpackError> {
        Ok(match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            _ if head.starts_with(&LZ4_MAGIC) => Self::Lz4,
            [b'B', b'Z', b'h', ..] => return Err(UnpackError::Unsupported("bzip2")),
            [0x5d, 0, 0, ..] => return Err(UnpackError::Unsupported("lzma")),
            [0x89, b'L', b'Z', b'O', ..] => return Err(UnpackError::Unsupported("lzo")),
            _ => Self::None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::None => "uncompressed",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Lz4 => "lz4",
        }
    }

    /// Unpacks what is read. Errors of the data are `InvalidData` or `UnexpectedEof`.
    pub(super) fn reader<'a>(self, from: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        let from = BufReader::with_capacity(64 << 10, from);
        Ok(match self {
            Self::None => Box::new(from),
            Self::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(from)),
            Self::Zstd => Box::new(Zstd(ruzstd::decoding::StreamingDecoder::new(from).map_err(io::Error::other)?)),
            Self::Xz => Box::new(lzma_rust2::XzReader::new_mem_limit(from, true, MAX_WINDOW_KIB)),
            Self::Lz4 => Box::new(Lz4::new(from)?),
        })
    }
}

/// Unpacks `bytes`, whatever they are packed with, to at most `limit` bytes. What is not packed is copied.
pub(super) fn unpack(bytes: &[u8], limit: u64) -> Result<Vec<u8>, UnpackError> {
    let compression = Compression::of(bytes)?;
    let damaged = |error| UnpackError::Damaged { format: compression.name(), error };
    let mut out = Vec::new();
    let reader = compression.reader(bytes).map_err(damaged)?;
    reader.take(limit.saturating_add(1)).read_to_end(&mut out).map_err(damaged)?;
    if u64::try_from(out.len()).unwrap_or(u64::MAX) > limit {
        return Err(UnpackError::TooLarge { limit });
    }
    Ok(out)
}

/// A zstd frame. The decoder leaves its checksum to be compared.
struct Zstd<R: Read>(ruzstd::decoding::StreamingDecoder<R, ruzstd::decoding::FrameDecoder>);

impl<R: Read> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        if read == 0 && !buffer.is_empty() {
            let frame = &self.0.decoder;
            let stored = frame.get_checksum_from_data();
            if stored.is_some() && stored != frame.get_calculated_checksum() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "wrong checksum"));
            }
        }
        Ok(read)
    }
}

/// The legacy LZ4 format: the magic, then blocks, each after its packed length in 32 bits.
struct Lz4<R> {
    from: R,
    packed: Vec<u8>,
    block: Vec<u8>,
    /// How much of `block` was given out.
    given: usize,
}

impl<R: Read> Lz4<R> {
    fn new(mut from: R) -> io::Result<Self> {
        from.read_exact(&mut [0; 4])?;
        Ok(Self { from, packed: Vec::new(), block: Vec::new(), given: 0 })
    }

    /// Unpacks the next block; false at the end.
    fn next(&mut self) -> io::Result<bool> {
        let mut length = [0; 4];
        loop {
            match self.from.read(&mut length[..1])? {
                0 => return Ok(false),
                _ => self.from.read_exact(&mut length[1..])?,
            }
            // Archives of this format may be joined, each with its magic.
            if length != LZ4_MAGIC {
                break;
            }
        }
        let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
        // Incompressible data grows by 1 in 255, and a few bytes.
        if length > LZ4_BLOCK.saturating_add(LZ4_BLOCK / 255).saturating_add(16) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a block longer than any is"));
        }
        self.packed.resize(length, 0);
        self.from.read_exact(&mut self.packed)?;
        self.block.resize(LZ4_BLOCK, 0);
        let unpacked = lz4_flex::block::decompress_into(&self.packed, &mut self.block)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.block.truncate(unpacked);
        self.given = 0;
        Ok(true)
    }
}

impl<R: Read> Read for Lz4<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.given >= self.block.len() {
            if !self.next()? {
                return Ok(0);
            }
        }
        let mut rest = self.block.get(self.given..).unwrap_or_default();
        let read = rest.read(buffer)?;
        self.given = self.given.saturating_add(read);
        Ok(read)
    }
}

/// Packs, for the tests of this and of what reads packed things.
#[cfg(test)]
pub(super) mod pack {
    use std::io::Write;

    use super::*;

    pub(in crate::kernel) const ALL: [Compression; 5] =
        [Compression::None, Compression::Gzip, Compression::Zstd, Compression::Xz, Compression::Lz4];

    /// As the kernel's build packs: xz with the filter for x86 code, lz4 in its legacy format.
    pub(in crate::kernel) fn pack(bytes: &[u8], with: Compression) -> Vec<u8> {
        match with {
            Compression::None => bytes.to_vec(),
            Compression::Gzip => {
                let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                writer.write_all(bytes).unwrap();
                writer.finish().unwrap()
            }
            Compression::Zstd => ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest),
            Compression::Xz => {
                let mut options = lzma_rust2::XzOptions::with_preset(0);
                options.prepend_pre_filter(lzma_rust2::filter::FilterType::BcjX86, 0);
                let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
                writer.write_all(bytes).unwrap();
                writer.finish().unwrap()
            }
            Compression::Lz4 => {
                let mut out = LZ4_MAGIC.to_vec();
                for block in bytes.chunks(LZ4_BLOCK) {
                    let packed = lz4_flex::block::compress(block);
                    out.extend(u32::try_from(packed.len()).unwrap().to_le_bytes());
                    out.extend(packed);
                }
                out
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::pack::{ALL, pack};
    use super::*;

    fn sample(length: usize) -> Vec<u8> {
        (0..length).map(|n| u8::try_from((n * n / 7 + n / 1000) % 251).unwrap()).collect()
    }

    #[test]
    fn every_compression_is_known_and_unpacked() {
        for compression in ALL {
            // More than one block of lz4.
            for length in [0, 1, 100_000, (8 << 20) + 3] {
                let bytes = sample(length);
                let packed = pack(&bytes, compression);
                assert_eq!(Compression::of(&packed).unwrap(), compression);
                assert!(unpack(&packed, 9 << 20).unwrap() == bytes, "{compression:?} {length}");
            }
        }
    }

    #[test]
    fn more_than_the_limit_is_refused() {
        for compression in ALL {
            let packed = pack(&[0; 100_000], compression);
            assert!(matches!(unpack(&packed, 99_999), Err(UnpackError::TooLarge { limit: 99_999 })));
            assert_eq!(unpack(&packed, 100_000).unwrap().len(), 100_000);
        }
    }

    #[test]
    fn what_is_cut_short_or_changed_is_refused() {
        let bytes = sample(300_000);
        for compression in ALL.into_iter().skip(1) {
            let packed = pack(&bytes, compression);
            for cut in [packed.len() - 1, packed.len() / 2, 8] {
                let cut = unpack(&packed[..cut], 1 << 20);
                assert!(matches!(cut, Err(UnpackError::Damaged { .. })), "{compression:?}: {:?}", cut.map(|b| b.len()));
            }
            // This lz4 format has no checksum; a kernel's length is compared where it is unpacked.
            if compression != Compression::Lz4 {
                let mut changed = packed.clone();
                let middle = changed.len() / 2;
                changed[middle] ^= 0x10;
                let changed = unpack(&changed, 1 << 20);
                assert!(matches!(changed, Err(UnpackError::Damaged { .. })), "{compression:?}");
            }
        }
    }

    #[test]
    fn formats_without_a_decoder_are_named() {
        for (head, name) in [(&b"BZh9"[..], "bzip2"), (&[0x5d, 0, 0, 4], "lzma"), (b"\x89LZO\0\r\n", "lzo")] {
            assert!(unpack(head, 10).unwrap_err().to_string().contains(name));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_unpacked_or_refused(which in 0_usize..5, bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let magic: &[u8] = [&[][..], &[0x1f, 0x8b, 8], &[0x28, 0xb5, 0x2f, 0xfd], b"\xfd7zXZ\0", &LZ4_MAGIC][which];
            let _ = unpack(&[magic, &bytes].concat(), 1 << 16);
        }

        #[test]
        fn any_damage_is_survived(which in 0_usize..5, at in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut packed = pack(&sample(5000), ALL[which]);
            let at = at.index(packed.len());
            packed[at] = to;
            let _ = unpack(&packed, 1 << 16);
        }
    }
}
