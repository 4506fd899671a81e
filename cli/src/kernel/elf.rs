//! As much of ELF as says whether a file is a kernel that we can enter, and what a module says of itself.
//!
//! Sources: the ELF-64 specification; for the note, Xen's `elfnote.h` (`XEN_ELFNOTE_PHYS32_ENTRY`).
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

/// `EM_X86_64`.
const X86_64: u16 = 62;
/// `PT_LOAD` and `PT_NOTE`.
const LOAD: u32 = 1;
const NOTE: u32 = 4;
/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const PVH_ENTRY: u32 = 18;

/// Why an ELF file is not what it is taken for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ElfError {
    /// Another format.
    #[error("it is no ELF file")]
    NotElf,
    /// For 32 bits, or big-endian.
    #[error("it is not for 64-bit x86: it is a 32-bit or big-endian ELF file")]
    NotLittle64,
    /// For another machine.
    #[error("it is not for x86-64 but for {0}")]
    OtherMachine(String),
    /// A table or segment beyond the end.
    #[error("it is damaged or cut short: its {0} lies outside the file")]
    CutShort(&'static str),
    /// Nothing to load.
    #[error("it is no kernel: it has nothing to load")]
    NothingToLoad,
    /// No way in.
    #[error(
        "it has no PVH entry point; it needs to be built with CONFIG_PVH=y, as the kernels of distributions are (for \
         Debian, linux-image-amd64 and linux-image-cloud-amd64)"
    )]
    NoPvh,
}

/// Checks that this is an uncompressed x86-64 kernel with a PVH entry point.
pub(super) fn check_kernel(file: &[u8]) -> Result<(), ElfError> {
    header(file)?;
    let (mut loads, mut enters) = (false, false);
    for segment in table(file, 0x20, 0x36, 0x38, 56, "program header table")? {
        let kind = u32_at(segment, 0).ok_or(ElfError::CutShort("program header table"))?;
        if kind != LOAD && kind != NOTE {
            continue;
        }
        let content = part(file, u64_at(segment, 8), u64_at(segment, 32)).ok_or(ElfError::CutShort("segment"))?;
        loads |= kind == LOAD;
        enters |= kind == NOTE && has_pvh_note(content);
    }
    match (loads, enters) {
        (false, _) => Err(ElfError::NothingToLoad),
        (_, false) => Err(ElfError::NoPvh),
        _ => Ok(()),
    }
}

/// The content of the section of this name.
pub(super) fn section<'a>(file: &'a [u8], name: &str) -> Result<Option<&'a [u8]>, ElfError> {
    header(file)?;
    let sections: Vec<&[u8]> = table(file, 0x28, 0x3a, 0x3c, 64, "section header table")?.collect();
    let content = |section: &[u8]| part(file, u64_at(section, 24), u64_at(section, 32));
    let names = u16_at(file, 0x3e).and_then(|index| sections.get(usize::from(index))).and_then(|names| content(names));
    let names = names.ok_or(ElfError::CutShort("section names"))?;
    let named = |section: &&&[u8]| {
        let at = u32_at(section, 0).and_then(|at| usize::try_from(at).ok());
        let rest = at.and_then(|at| names.get(at..)).and_then(|rest| rest.strip_prefix(name.as_bytes()));
        rest.is_some_and(|rest| rest.first() == Some(&0))
    };
    let Some(found) = sections.iter().find(named) else { return Ok(None) };
    content(found).map(Some).ok_or(ElfError::CutShort("section"))
}

fn header(file: &[u8]) -> Result<(), ElfError> {
    match file {
        [0x7f, b'E', b'L', b'F', 2, 1, ..] => {}
        [0x7f, b'E', b'L', b'F', ..] => return Err(ElfError::NotLittle64),
        _ => return Err(ElfError::NotElf),
    }
    match u16_at(file, 18) {
        Some(X86_64) => Ok(()),
        Some(183) => Err(ElfError::OtherMachine("arm64".to_owned())),
        Some(243) => Err(ElfError::OtherMachine("RISC-V".to_owned())),
        Some(other) => Err(ElfError::OtherMachine(format!("ELF machine {other}"))),
        None => Err(ElfError::CutShort("header")),
    }
}

/// The entries of a table whose offset, entry size and count stand at these places of the header.
fn table<'a>(
    file: &'a [u8],
    offset_at: usize,
    size_at: usize,
    count_at: usize,
    size: u16,
    what: &'static str,
) -> Result<impl Iterator<Item = &'a [u8]>, ElfError> {
    let entry = u16_at(file, size_at).unwrap_or(0);
    let count = u16_at(file, count_at).unwrap_or(0);
    // Larger entries would be a later version's; none has come in thirty years.
    if count > 0 && entry != size {
        return Err(ElfError::CutShort(what));
    }
    let length = u64::from(size).saturating_mul(u64::from(count));
    let all = part(file, u64_at(file, offset_at), Some(length)).ok_or(ElfError::CutShort(what))?;
    Ok(all.chunks_exact(usize::from(size).max(1)))
}

/// Whether the notes have the one that says where a PVH kernel is entered.
fn has_pvh_note(mut notes: &[u8]) -> bool {
    let padded = |length: u32| usize::try_from(length).ok()?.checked_next_multiple_of(4);
    let mut next = || -> Option<bool> {
        let (name, content, kind) = (u32_at(notes, 0)?, u32_at(notes, 4)?, u32_at(notes, 8)?);
        let rest = notes.get(12..)?;
        let found = kind == PVH_ENTRY && name == 4 && content >= 4 && rest.starts_with(b"Xen\0");
        notes = rest.get(padded(name)?..)?.get(padded(content)?..).unwrap_or_default();
        Some(found)
    };
    while let Some(found) = next() {
        if found {
            return true;
        }
    }
    false
}

fn part(file: &[u8], offset: Option<u64>, length: Option<u64>) -> Option<&[u8]> {
    let start = usize::try_from(offset?).ok()?;
    file.get(start..start.checked_add(usize::try_from(length?).ok()?)?)
}

/// A little-endian number at this place, if the place is there.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// See [`u16_at`].
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Files made up, for the tests of this and of what reads kernels and modules.
#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
pub(super) mod make {
    fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
        file[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn blank(length: usize) -> Vec<u8> {
        let mut file = vec![0; length];
        put(&mut file, 0, b"\x7fELF\x02\x01\x01");
        put(&mut file, 18, &62_u16.to_le_bytes());
        file
    }

    /// A kernel: something to load, the note, the banner, and some bulk.
    pub(in crate::kernel) fn kernel(release: &str) -> Vec<u8> {
        let mut file = blank(64 + 2 * 56);
        put(&mut file, 0x20, &64_u64.to_le_bytes());
        put(&mut file, 0x36, &56_u16.to_le_bytes());
        put(&mut file, 0x38, &2_u16.to_le_bytes());
        let banner = format!("Linux version {release} (someone@somewhere) #1 SMP\n\0");
        let mut content = b"Linux version %s\0".to_vec();
        content.extend(banner.as_bytes());
        content.extend((0..200_000_u32).flat_map(|n| (n / 3).to_le_bytes()));
        let mut notes = Vec::new();
        for (name, kind) in [(&b"GNU\0"[..], 3_u32), (b"Xen\0", 6), (b"Xen\0", 18)] {
            for number in [4_u32, 4, kind] {
                notes.extend(number.to_le_bytes());
            }
            notes.extend(name);
            notes.extend(0x0100_0a30_u32.to_le_bytes());
        }
        for (index, (kind, bytes)) in [(1_u32, content), (4, notes)].into_iter().enumerate() {
            let (at, start) = (64 + index * 56, file.len() as u64);
            put(&mut file, at, &kind.to_le_bytes());
            put(&mut file, at + 8, &start.to_le_bytes());
            put(&mut file, at + 32, &(bytes.len() as u64).to_le_bytes());
            file.extend(bytes);
        }
        file
    }

    /// A module with these lines in its `.modinfo`.
    pub(in crate::kernel) fn module(lines: &[String]) -> Vec<u8> {
        let mut file = blank(64);
        let names = b"\0.shstrtab\0.modinfo\0";
        let info: Vec<u8> = lines.iter().flat_map(|line| [line.as_bytes(), b"\0"].concat()).collect();
        let places = [(0, 0, 0), (1_u32, file.len(), names.len()), (11, file.len() + names.len(), info.len())];
        file.extend(names);
        file.extend(info);
        let table = file.len() as u64;
        for (name, start, length) in places {
            let mut entry = [0; 64];
            put(&mut entry, 0, &name.to_le_bytes());
            put(&mut entry, 24, &(start as u64).to_le_bytes());
            put(&mut entry, 32, &(length as u64).to_le_bytes());
            file.extend(entry);
        }
        put(&mut file, 0x28, &table.to_le_bytes());
        put(&mut file, 0x3a, &64_u16.to_le_bytes());
        put(&mut file, 0x3c, &3_u16.to_le_bytes());
        put(&mut file, 0x3e, &1_u16.to_le_bytes());
        file
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_kernel_with_the_note_is_one() {
        let kernel = make::kernel("6.1.0");
        assert_eq!(check_kernel(&kernel), Ok(()));
        let mut other = kernel.clone();
        // The note's type.
        let at = other.windows(8).rposition(|window| window == b"\x12\0\0\0Xen\0").unwrap();
        other[at] = 17;
        assert_eq!(check_kernel(&other), Err(ElfError::NoPvh));
        other = kernel.clone();
        other[18] = 183;
        assert_eq!(check_kernel(&other), Err(ElfError::OtherMachine("arm64".into())));
        other = kernel.clone();
        other[4] = 1;
        assert_eq!(check_kernel(&other), Err(ElfError::NotLittle64));
        assert_eq!(check_kernel(&kernel[..1000]), Err(ElfError::CutShort("segment")));
        assert_eq!(check_kernel(&kernel[..100]), Err(ElfError::CutShort("program header table")));
        assert_eq!(check_kernel(b"#!/bin/sh"), Err(ElfError::NotElf));
        assert_eq!(check_kernel(&make::module(&[])), Err(ElfError::NothingToLoad));
    }

    #[test]
    fn a_section_is_found_by_its_whole_name() {
        let module = make::module(&["depends=a,b".into()]);
        assert_eq!(section(&module, ".modinfo"), Ok(Some(&b"depends=a,b\0"[..])));
        assert_eq!(section(&module, ".mod"), Ok(None));
        assert_eq!(section(&module, ".text"), Ok(None));
        assert_eq!(section(&module[..module.len() - 1], ".modinfo"), Err(ElfError::CutShort("section header table")));
    }

    proptest! {
        #[test]
        fn any_damage_is_survived(changes in prop::collection::vec((0_usize..400, any::<u8>()), 1..8)) {
            for mut file in [make::kernel("6.1.0"), make::module(&["depends=".into()])] {
                for (at, to) in &changes {
                    let length = file.len();
                    file[at % length] = *to;
                }
                let _ = check_kernel(&file);
                let _ = section(&file, ".modinfo");
            }
        }
    }
}
