//! Ports and physical addresses, without asking anybody.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Where marks go.
const MARK_PORT: u16 = 0x3f0;
/// Writes here end the guest, so garbage leaves them out: (port, value).
const STOPS: [u16; 3] = [0x600, 0x604, 0x64];
/// The interrupt controllers of old are KVM's, not ours, and left out: nonsense in them makes interrupts into exceptions,
/// which the guest's own kernel does not survive, and now and then the emulated host's kernel does not either.
const PIC: [u16; 6] = [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1];
/// The window of all virtio devices.
const VIRTIO: (u64, usize) = (0xc000_1000, 18 << 12);

/// Takes the right to use ports.
pub(crate) fn open() {
    // SAFETY: iopl changes nothing but this process's privileges.
    unsafe { libc::iopl(3) };
}

/// Leaves a mark.
pub(crate) fn mark(value: u8) {
    out(MARK_PORT, value);
}

/// Writes to a port.
pub(crate) fn put(port: u16, value: u8) {
    out(port, value);
}

fn out(port: u16, value: u8) {
    // SAFETY: port writes touch no memory of this process.
    unsafe { std::arch::asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

fn out32(port: u16, value: u32) {
    // SAFETY: port writes touch no memory of this process.
    unsafe { std::arch::asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack)) };
}

/// Reads a port.
pub(crate) fn read(port: u16) -> u8 {
    let value: u8;
    // SAFETY: port reads touch no memory of this process.
    unsafe { std::arch::asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

/// A small generator of reproducible numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Seeds that differ little give numbers that differ much.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1))
    }

    /// A number below a limit.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 16) as usize % limit.max(1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Every port once, random ports, registers.
pub(crate) fn garbage(seed: u64) {
    let mut random = Random::new(seed);
    for port in 0..=u16::MAX {
        if !STOPS.contains(&port) && !PIC.contains(&port) {
            read(port);
            out(port, random.next() as u8);
        }
    }
    mark(20);
    for _ in 0..20_000 {
        let (port, value) = (random.next() as u16, random.next() as u32);
        // A wide write reaches four ports, and the kernel lets none reach beyond the last.
        let fatal = |port| (0x600..0x610).contains(&port) || (0x60..=0x64).contains(&port) || PIC.contains(&port);
        if port <= u16::MAX - 3 && !(port..=port + 3).any(fatal) {
            out32(port, value);
        }
    }
    mark(21);
    if !registers(seed) {
        return mark(253);
    }
    mark(22);
}

/// Every virtio register of every device, random registers, other device addresses; whether they could be reached.
fn registers(seed: u64) -> bool {
    let mut random = Random::new(seed);
    let Ok(memory) = File::options().read(true).write(true).open("/dev/mem") else { return false };
    for (base, length) in [VIRTIO, (0xd000_0000, 1 << 16), (0xfed0_0000, 1 << 16)] {
        // SAFETY: a new mapping of device addresses, at an address of the kernel's choice.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                memory.as_raw_fd(),
                base.cast_signed(),
            )
        };
        if map == libc::MAP_FAILED {
            return false;
        }
        let words = map.cast::<u32>();
        let count = length / 4;
        let write = |index: usize, value: u32| {
            // SAFETY: index is below the mapping's length in words.
            unsafe { words.add(index % count).write_volatile(value) };
        };
        for index in 0..count.min(2 << 10) {
            write(index, random.next() as u32);
        }
        for _ in 0..4_000 {
            // Mostly registers, and mostly values that mean something to one.
            let index = ((random.next() as usize % count) & !0x3c0) | (random.next() as usize % 0x2c);
            let value = random.next();
            write(index, if value & 1 == 0 { value as u32 } else { (value >> 1) as u32 & 0x1f });
        }
        // SAFETY: the mapping was made above, with this length.
        unsafe { libc::munmap(map, length) };
    }
    true
}
