//! Whether a program is static. One that is not would fail too, later and with an error that says nothing.

use std::os::fd::BorrowedFd;

use rustix::io::{Errno, pread};

/// Most program headers that are looked at.
const MAX_HEADERS: usize = 64;
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const PT_INTERP: u32 = 3;

/// Refuses what is no 64-bit ELF file, and what names an interpreter (`elf(5)`).
pub(crate) fn check_static(program: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut header = [0; HEADER];
    if pread(program, &mut header, 0)? != HEADER || !header.starts_with(b"\x7fELF\x02\x01") {
        return Err(Errno::NOEXEC);
    }
    let start = u64::from_le_bytes(field(&header, 32)?);
    let size = usize::from(u16::from_le_bytes(field(&header, 54)?));
    let count = usize::from(u16::from_le_bytes(field(&header, 56)?));
    if size != PROGRAM_HEADER || count > MAX_HEADERS {
        return Err(Errno::NOEXEC);
    }
    let mut table = [0; MAX_HEADERS * PROGRAM_HEADER];
    let table = table.get_mut(..count.saturating_mul(size)).ok_or(Errno::NOEXEC)?;
    if pread(program, &mut *table, start)? != table.len() {
        return Err(Errno::NOEXEC);
    }
    for header in table.chunks_exact(PROGRAM_HEADER) {
        if u32::from_le_bytes(field(header, 0)?) == PT_INTERP {
            return Err(Errno::NOEXEC);
        }
    }
    Ok(())
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Errno> {
    let end = at.saturating_add(N);
    bytes.get(at..end).and_then(|field| field.try_into().ok()).ok_or(Errno::NOEXEC)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    fn check(bytes: &[u8]) -> Result<(), Errno> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        check_static(file.as_fd())
    }

    /// An ELF file with one program header of this type.
    fn program(kind: u32) -> Vec<u8> {
        let mut bytes = vec![0; HEADER + PROGRAM_HEADER];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64..68].copy_from_slice(&kind.to_le_bytes());
        bytes
    }

    #[test]
    fn a_static_program_is_told_from_a_dynamic_one() {
        // This test is static, as every program of the workspace.
        assert_eq!(check_static(File::open("/proc/self/exe").unwrap().as_fd()), Ok(()));
        assert_eq!(check(&program(1)), Ok(()));
        assert_eq!(check(&program(PT_INTERP)), Err(Errno::NOEXEC));
    }

    #[test]
    fn what_is_no_program_is_refused() {
        assert_eq!(check(b""), Err(Errno::NOEXEC));
        assert_eq!(check(b"#!/bin/sh\n"), Err(Errno::NOEXEC));
        assert_eq!(check(&program(1)[..HEADER]), Err(Errno::NOEXEC));
        let mut many = program(1);
        many[57] = 0xff;
        assert_eq!(check(&many), Err(Errno::NOEXEC));
        let mut far = program(1);
        far[32..40].fill(0xff);
        assert!(check(&far).is_err());
    }
}
