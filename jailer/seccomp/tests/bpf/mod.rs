//! What the kernel does with a program. Used by the tests here and by the end-to-end tests.

pub(crate) const ALLOW: u32 = 0x7fff_0000;
pub(crate) const KILL_PROCESS: u32 = 0x8000_0000;
pub(crate) const X86_64: u32 = 0xc000_003e;

/// `struct seccomp_data`
#[derive(Debug, Clone, Copy)]
pub(crate) struct Data {
    pub(crate) number: i32,
    pub(crate) architecture: u32,
    pub(crate) arguments: [u64; 6],
}

impl Data {
    fn word(&self, offset: u32) -> u32 {
        let half =
            |value: u64, high: bool| u32::try_from(if high { value >> 32 } else { value & 0xffff_ffff }).unwrap();
        match offset {
            0 => self.number.cast_unsigned(),
            4 => self.architecture,
            16..64 => half(self.arguments[(offset as usize - 16) / 8], offset % 8 == 4),
            _ => panic!("offset {offset}"),
        }
    }
}

/// What the kernel does with a program: the instructions that seccomp accepts and our programs use.
pub(crate) fn run(program: &[libc::sock_filter], data: &Data) -> u32 {
    let (mut at, mut register) = (0, 0);
    loop {
        let libc::sock_filter { code, jt, jf, k } = program[at];
        let jump = |holds: bool| usize::from(if holds { jt } else { jf });
        at += 1;
        match code {
            0x20 => register = data.word(k),
            0x54 => register &= k,
            0x05 => at += k as usize,
            0x15 => at += jump(register == k),
            0x25 => at += jump(register > k),
            0x35 => at += jump(register >= k),
            0x06 => return k,
            _ => panic!("instruction {code:#x}"),
        }
    }
}
