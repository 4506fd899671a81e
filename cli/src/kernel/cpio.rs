//! The archive of a kernel's modules, in the "newc" format that kernels unpack (Linux,
//! `Documentation/driver-api/early-userspace/buffer-format.rst`). The same content gives the same bytes.

/// Archives are padded to this, so that another may follow.
const BLOCK: usize = 512;

/// A directory and a file, as `st_mode` has them.
const DIRECTORY: u32 = 0o40755;
const FILE: u32 = 0o100_644;

/// An archive with one directory, `modules`, that has these files, and a file `order` with their names, a line each.
pub(super) fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let order: String = files.iter().map(|(name, _)| format!("{name}\n")).collect();
    let mut out = Vec::new();
    entry(&mut out, 1, "modules", DIRECTORY, &[]);
    entry(&mut out, 2, "modules/order", FILE, order.as_bytes());
    for (number, (name, content)) in files.iter().enumerate() {
        entry(&mut out, number.saturating_add(3), &format!("modules/{name}"), FILE, content);
    }
    entry(&mut out, 0, "TRAILER!!!", 0, &[]);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    out
}

fn entry(out: &mut Vec<u8>, number: usize, name: &str, mode: u32, content: &[u8]) {
    // Magic, number, mode, user, group, links, time, length, device (twice two), name's length, checksum (unused).
    let name_length = name.len().saturating_add(1);
    let length = content.len();
    out.extend(format!("070701{number:08X}{mode:08X}{0:08X}{0:08X}{1:08X}{0:08X}{length:08X}", 0, 1).as_bytes());
    out.extend(format!("{0:08X}{0:08X}{0:08X}{0:08X}{name_length:08X}{0:08X}{name}\0", 0).as_bytes());
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend(content);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GNU cpio reads it, where it is installed; the end-to-end tests have kernels read it.
    #[test]
    fn the_format_is_newc() {
        let archive = archive(&[("a.ko".into(), vec![1, 2, 3]), ("bc.ko".into(), vec![])]);
        assert_eq!(archive.len() % BLOCK, 0);
        let text = |from: usize, length: usize| std::str::from_utf8(&archive[from..from + length]).unwrap();
        // The directory: 110 bytes of header, its name with a NUL, padding to a multiple of four.
        assert_eq!(text(0, 22), "07070100000001000041ED");
        assert_eq!(text(94, 8), "00000008");
        assert_eq!(text(110, 8), "modules\0");
        // The order: padded name, then content.
        assert_eq!(text(120, 22), "07070100000002000081A4");
        assert_eq!(text(120 + 54, 8), "0000000B");
        assert_eq!(text(120 + 110, 14), "modules/order\0");
        assert_eq!(text(120 + 124, 11), "a.ko\nbc.ko\n");
        assert!(archive.windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
