//! From a kernel as distributions ship it to the ELF file that is entered.
//!
//! A bzImage says in its setup header where its compressed payload lies (Linux, `Documentation/arch/x86/boot.rst`,
//! fields `setup_sects`, `payload_offset` and `payload_length`); nothing is searched for. The kernel's build lets every
//! payload end with the unpacked length, so a short one is noticed whatever it is packed with.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::compression::{Compression, UnpackError, unpack};
use super::elf::{self, ElfError, u16_at, u32_at};

/// Largest kernel, unpacked: ten times as large as any distribution's.
const MAX_KERNEL: u64 = 512 << 20;
/// Oldest version: the agent ends commands through `cgroup.kill`.
const OLDEST: (u32, u32) = (5, 14);
/// Oldest version of the boot protocol whose setup header tells where the payload lies.
const OLDEST_PROTOCOL: u16 = 0x0208;

/// Why a file is no kernel for us.
#[derive(Debug, thiserror::Error)]
pub(super) enum VmlinuzError {
    /// Something else.
    #[error("it is no kernel: {0}; name a vmlinuz (bzImage) or vmlinux for x86-64")]
    NotAKernel(&'static str),
    /// A kernel for arm64.
    #[error("it is a kernel for arm64; guests are x86-64")]
    Arm64,
    /// From before 2008.
    #[error("it is too old: boot protocol {major}.{minor:02}; 2.08 (Linux 2.6.26) is the first that can be unpacked",
            major = .0 >> 8, minor = .0 & 0xff)]
    OldProtocol(u16),
    /// Older than the agent can do with.
    #[error("it is too old: {0}; the guest agent needs Linux {major}.{minor} or later", major = OLDEST.0, minor = OLDEST.1)]
    TooOld(String),
    /// Fields that point beyond the end.
    #[error("it is damaged or cut short: its {0} lies outside the file")]
    CutShort(&'static str),
    /// The compressed kernel in it.
    #[error("its payload cannot be unpacked: {0}")]
    Payload(#[from] UnpackError),
    /// Another length than the file says.
    #[error("it is damaged: its payload unpacks to {unpacked} bytes, and it says {said}")]
    WrongLength {
        /// What came out.
        unpacked: usize,
        /// What it says, modulo 2^32.
        said: u32,
    },
    /// The ELF file, unpacked or as it was.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// No banner, or one that is no release.
    #[error("it does not say its version")]
    NoRelease,
}

/// A kernel, ready to be entered.
#[derive(Debug)]
pub(super) struct Vmlinux {
    /// The ELF file.
    pub(super) elf: Vec<u8>,
    /// Its release, as `uname -r` prints it.
    pub(super) release: String,
}

/// Unpacks a vmlinuz, or takes a vmlinux, packed or not.
pub(super) fn read(file: Vec<u8>) -> Result<Vmlinux, VmlinuzError> {
    let vmlinux = if u32_at(&file, 0x202) == Some(u32::from_le_bytes(*b"HdrS")) && u16_at(&file, 0x1fe) == Some(0xaa55)
    {
        let release = file_version(&file);
        let elf = unpack_payload(&file)?;
        let release = release.or_else(|| banner(&elf)).ok_or(VmlinuzError::NoRelease)?;
        Vmlinux { elf, release }
    } else {
        if let Some(error) = other(&file) {
            return Err(error);
        }
        let elf = if Compression::of(&file)? == Compression::None { file } else { unpack(&file, MAX_KERNEL)? };
        if elf::check_kernel(&elf) == Err(ElfError::NotElf) {
            return Err(other(&elf).unwrap_or(VmlinuzError::NotAKernel("its first bytes are of no known kind")));
        }
        let release = banner(&elf);
        elf::check_kernel(&elf)?;
        Vmlinux { elf, release: release.ok_or(VmlinuzError::NoRelease)? }
    };
    elf::check_kernel(&vmlinux.elf)?;
    if version(&vmlinux.release).is_none_or(|version| version < OLDEST) {
        return Err(VmlinuzError::TooOld(vmlinux.release));
    }
    Ok(vmlinux)
}

fn unpack_payload(file: &[u8]) -> Result<Vec<u8>, VmlinuzError> {
    let header = VmlinuzError::CutShort("setup header");
    let protocol = u16_at(file, 0x206).ok_or(header)?;
    if protocol < OLDEST_PROTOCOL {
        return Err(VmlinuzError::OldProtocol(protocol));
    }
    let payload = payload(file).ok_or(VmlinuzError::CutShort("payload"))?;
    let (packed, said) = payload.split_last_chunk::<4>().ok_or(VmlinuzError::CutShort("payload"))?;
    // gzip has the length itself; with the others it was appended.
    let compression = Compression::of(packed)?;
    let elf = unpack(if compression == Compression::Gzip { payload } else { packed }, MAX_KERNEL)?;
    let said = u32::from_le_bytes(*said);
    // Modulo 2^32, which no kernel reaches.
    if u32::try_from(elf.len()) != Ok(said) {
        return Err(VmlinuzError::WrongLength { unpacked: elf.len(), said });
    }
    Ok(elf)
}

/// The payload: after the setup sectors (0 means 4), as far on as the header says.
fn payload(file: &[u8]) -> Option<&[u8]> {
    let sectors = match *file.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let setup = sectors.checked_add(1)?.checked_mul(512)?;
    let start = setup.checked_add(usize::try_from(u32_at(file, 0x248)?).ok()?)?;
    file.get(start..start.checked_add(usize::try_from(u32_at(file, 0x24c)?).ok()?)?)
}

/// The release by the setup header's `kernel_version`, which points to a string that begins with it.
fn file_version(file: &[u8]) -> Option<String> {
    let at = usize::from(u16_at(file, 0x20e)?);
    if at == 0 { None } else { release(file.get(at.checked_add(0x200)?..)?) }
}

/// The release by the banner that every kernel has for `/proc/version`.
fn banner(elf: &[u8]) -> Option<String> {
    const BEFORE: &[u8] = b"Linux version ";
    let mut rest = elf;
    while let Some(at) = rest.windows(BEFORE.len()).position(|window| window == BEFORE) {
        rest = rest.get(at.checked_add(BEFORE.len())?..)?;
        // One of them is a format.
        if let Some(release) = release(rest) {
            return Some(release);
        }
    }
    None
}

/// The release with which this text begins: up to 64 characters, as `uname` has room for, and fit for a file's name.
fn release(text: &[u8]) -> Option<String> {
    let text = text.get(..65).unwrap_or(text);
    let end = text.iter().position(|byte| byte.is_ascii_whitespace() || *byte == 0)?;
    let word = std::str::from_utf8(text.get(..end)?).ok()?;
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || ".+-_~".contains(c));
    (plain && version(word).is_some()).then(|| word.to_owned())
}

/// Major and minor version of a release.
fn version(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((major.parse().ok()?, rest.get(..end)?.parse().ok()?))
}

/// What people may take for a kernel of ours.
fn other(file: &[u8]) -> Option<VmlinuzError> {
    let is = |at: usize, magic: &[u8]| file.get(at..).is_some_and(|rest| rest.starts_with(magic));
    Some(match file {
        [] => VmlinuzError::NotAKernel("it is empty"),
        _ if is(0x38, b"ARM\x64") => VmlinuzError::Arm64,
        // An EFI program. That of a packed arm64 kernel says so; it names its kind of compression.
        _ if is(0, b"MZ") && is(4, b"zimg") => VmlinuzError::Arm64,
        _ if is(0, b"MZ") => VmlinuzError::NotAKernel(
            "it is an EFI program without a boot header, such as a unified kernel image; take the vmlinuz from which it \
             was made",
        ),
        _ if is(0, b"!<arch>\n") => VmlinuzError::NotAKernel("it is an archive (a Debian package or a library)"),
        _ if is(0, b"\xed\xab\xee\xdb") => VmlinuzError::NotAKernel("it is an RPM package; unpack it first"),
        _ if is(0, b"07070") => VmlinuzError::NotAKernel("it is an initramfs"),
        _ => return None,
    })
}

/// Kernels made up, for the tests of this and of the import.
#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
pub(super) mod make {
    use super::super::compression::pack::pack;
    use super::*;

    /// A bzImage of this payload, as the kernel's build puts it together.
    pub(in crate::kernel) fn bzimage(elf: &[u8], release: &str, with: Compression) -> Vec<u8> {
        let mut payload = pack(elf, with);
        if with != Compression::Gzip {
            payload.extend(u32::try_from(elf.len()).unwrap().to_le_bytes());
        }
        // Two setup sectors besides the first, then code before the payload and after it.
        let mut file = vec![0x90; 3 * 512 + 0x2cc];
        file[0x1f1] = 2;
        for (at, bytes) in [
            (0x1fe, &[0x55, 0xaa][..]),
            (0x202, b"HdrS\x0f\x02"),
            (0x20e, &0x300_u16.to_le_bytes()),
            (0x248, &0x2cc_u32.to_le_bytes()),
            (0x24c, &u32::try_from(payload.len()).unwrap().to_le_bytes()),
            (0x500, format!("{release} (someone@somewhere) #1 SMP\0").as_bytes()),
        ] {
            file[at..at + bytes.len()].copy_from_slice(bytes);
        }
        file.extend(payload);
        file.extend([0x90; 777]);
        file
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;

    use super::super::compression::pack::{ALL, pack};
    use super::super::elf::make::kernel;
    use super::make::bzimage;
    use super::*;

    const RELEASE: &str = "6.12.3+deb12-cloud-amd64";

    fn refused(file: &[u8]) -> String {
        read(file.to_vec()).unwrap_err().to_string()
    }

    #[test]
    fn every_kind_of_payload_is_unpacked() {
        let elf = kernel(RELEASE);
        for compression in ALL {
            let vmlinux = read(bzimage(&elf, RELEASE, compression)).unwrap();
            assert_eq!(vmlinux.release, RELEASE);
            assert!(vmlinux.elf == elf, "{compression:?}");
        }
    }

    #[test]
    fn a_vmlinux_is_taken_as_it_is_and_says_its_release() {
        let elf = kernel(RELEASE);
        for compression in ALL {
            let vmlinux = read(pack(&elf, compression)).unwrap();
            assert!(vmlinux.release == RELEASE && vmlinux.elf == elf, "{compression:?}");
        }
        let banner = b"Linux version 6";
        let at = elf.windows(banner.len()).position(|window| window == banner).unwrap();
        let mut silent = elf;
        silent[at] = b'l';
        assert_eq!(refused(&silent), "it does not say its version");
    }

    #[test]
    fn a_damaged_one_is_refused() {
        let elf = kernel(RELEASE);
        for compression in ALL {
            let whole = bzimage(&elf, RELEASE, compression);
            let cut = refused(&whole[..whole.len() / 2]);
            assert!(cut.contains("its payload lies outside the file"), "{cut}");
            // A block of lz4 less, a length that is not the unpacked one.
            let mut other = whole.clone();
            let end = other.len() - 777;
            other[end - 4] ^= 1;
            let other = refused(&other);
            assert!(other.contains("damaged"), "{compression:?}: {other}");
        }
        assert!(refused(&bzimage(&elf, RELEASE, Compression::Gzip)[..0x220]).contains("payload lies outside"));
    }

    #[test]
    fn what_is_no_kernel_of_ours_is_named() {
        let elf = kernel(RELEASE);
        assert!(refused(b"").contains("it is empty"));
        assert!(refused(b"#!/bin/sh\n").contains("no known kind"));
        assert!(refused(b"!<arch>\ndebian-binary").contains("Debian package"));
        assert!(refused(&pack(b"070701", Compression::Zstd)).contains("initramfs"));
        let mut arm = vec![0; 64];
        arm[0x38..0x3c].copy_from_slice(b"ARM\x64");
        assert!(refused(&arm).contains("arm64"));
        assert!(refused(&pack(&arm, Compression::Gzip)).contains("arm64"));
        assert!(refused(b"MZ\0\0zimg gzip").contains("arm64"));
        assert!(refused(b"MZ and more").contains("EFI program"));
        let mut old = bzimage(&elf, RELEASE, Compression::Gzip);
        old[0x206] = 7;
        assert!(refused(&old).contains("boot protocol 2.07"));
        let old = "4.19.0-5-amd64";
        assert!(refused(&bzimage(&kernel(old), old, Compression::Gzip)).contains("too old: 4.19.0-5-amd64"));
        assert!(refused(&bzimage(b"no ELF file", RELEASE, Compression::Xz)).contains("no ELF file"));
        let mut lzo = bzimage(&elf, RELEASE, Compression::None);
        lzo[3 * 512 + 0x2cc..][..4].copy_from_slice(b"\x89LZO");
        assert!(refused(&lzo).contains("compressed with lzo"));
    }

    #[test]
    fn a_release_is_one_word_that_fits_a_file_name() {
        assert_eq!(release(b"6.1.0-57-amd64 (x)").as_deref(), Some("6.1.0-57-amd64"));
        for text in [&b"%s (x)"[..], b"6.1/../x y", b"six.one x", b"6.1", b"", &[b'6'; 100]] {
            assert_eq!(release(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_survived(changes in prop::collection::vec((0x1f1_usize..0x260, any::<u8>()), 1..6)) {
            let mut file = bzimage(b"payload", RELEASE, Compression::Lz4);
            for (at, to) in changes {
                file[at] = to;
            }
            let _ = read(file);
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let _ = read(bytes);
        }
    }
}
