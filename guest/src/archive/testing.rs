//! Makes archives for tests, header by header.

/// A ustar header.
pub(crate) fn header(path: &str, kind: u8, mode: u32, size: usize, target: &str) -> Vec<u8> {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mut block = [0; 512];
    let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
    put(0, path.as_bytes());
    put(100, format!("{mode:07o}\0").as_bytes());
    put(108, format!("{uid:07o}\0").as_bytes());
    put(116, format!("{gid:07o}\0").as_bytes());
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, format!("{:011o}\0", 1_000_000_000).as_bytes());
    put(156, &[kind]);
    put(157, target.as_bytes());
    put(257, b"ustar\x0000");
    put(329, b"0000001\0");
    put(337, b"0000003\0");
    sealed(block)
}

/// The same with the right checksum.
pub(crate) fn sealed(mut block: [u8; 512]) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block.to_vec()
}

/// A header and its data.
pub(crate) fn member(path: &str, kind: u8, mode: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = header(path, kind, mode, data.len(), "");
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

pub(crate) fn file(path: &str, data: &str) -> Vec<u8> {
    member(path, b'0', 0o644, data.as_bytes())
}

pub(crate) fn directory(path: &str) -> Vec<u8> {
    member(path, b'5', 0o755, b"")
}

pub(crate) fn link(path: &str, target: &str) -> Vec<u8> {
    header(path, b'1', 0o644, 0, target)
}

pub(crate) fn symlink(path: &str, target: &str) -> Vec<u8> {
    header(path, b'2', 0o777, 0, target)
}

/// A pax header of these records.
pub(crate) fn pax(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        // The length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let length = (1..10).map(|digits| rest + digits).find(|n| rest + n.to_string().len() == *n).unwrap();
        body.extend_from_slice(format!("{length} {key}=").as_bytes());
        body.extend_from_slice(value);
        body.push(b'\n');
    }
    member("pax", b'x', 0o644, &body)
}

/// Members and the end mark.
pub(crate) fn archive(members: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = members.concat();
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}
