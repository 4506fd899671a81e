//! The optional serial console: the output half of a 16550A.
//!
//! It exists for looking at a kernel that does not start. There is no input, so there is nothing to bound or to
//! inject. Registers are atomics, because any vCPU may write and none may wait; output goes through a bounded
//! channel that drops and counts when full, because a vCPU never waits for a file (Firecracker issue 2381).

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use vmm_sys_util::eventfd::EventFd;

/// Bytes that may wait for the event loop.
pub const BACKLOG: usize = 16 << 10;

const DATA: u16 = 0;
const INTERRUPT_ENABLE: u16 = 1;
const INTERRUPT_ID: u16 = 2;
const LINE_CONTROL: u16 = 3;
const MODEM_CONTROL: u16 = 4;
const LINE_STATUS: u16 = 5;
const MODEM_STATUS: u16 = 6;
const SCRATCH: u16 = 7;

/// Divisor latch access: registers 0 and 1 are the divisor while it is set.
const DLAB: u8 = 0x80;
/// Interrupt when the transmitter is empty.
const TRANSMITTER_INTERRUPT: u8 = 0x02;

/// The registers, shared by all vCPUs.
#[derive(Debug)]
pub struct Serial {
    interrupt_enable: AtomicU8,
    line_control: AtomicU8,
    modem_control: AtomicU8,
    scratch: AtomicU8,
    divisor: [AtomicU8; 2],
    interrupt: EventFd,
    output: SyncSender<u8>,
    dropped: AtomicU64,
}

impl Serial {
    /// A console that raises `interrupt`, and the bytes that come out of it.
    pub fn new(interrupt: EventFd) -> (Self, Receiver<u8>) {
        let (output, bytes) = sync_channel(BACKLOG);
        let serial = Self {
            interrupt_enable: AtomicU8::new(0),
            line_control: AtomicU8::new(0),
            modem_control: AtomicU8::new(0),
            scratch: AtomicU8::new(0),
            divisor: [AtomicU8::new(0), AtomicU8::new(0)],
            interrupt,
            output,
            dropped: AtomicU64::new(0),
        };
        (serial, bytes)
    }

    /// The registers that a save keeps.
    pub fn save(&self) -> [u8; 6] {
        let Self { interrupt_enable, line_control, modem_control, scratch, divisor: [low, high], .. } = self;
        [interrupt_enable, line_control, modem_control, scratch, low, high]
            .map(|register| register.load(Ordering::Relaxed))
    }

    /// Goes on with saved registers. The interrupt that was under way is raised again.
    pub fn restore(&self, [enable, line, modem, scratch, low, high]: [u8; 6]) {
        for (register, value) in [
            (&self.interrupt_enable, enable & 0x0f),
            (&self.line_control, line),
            (&self.modem_control, modem & 0x1f),
            (&self.scratch, scratch),
            (&self.divisor[0], low),
            (&self.divisor[1], high),
        ] {
            register.store(value, Ordering::Relaxed);
        }
        self.signal_empty();
    }

    /// Bytes that were dropped because nobody took them in time.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// The guest reads register `offset`.
    pub fn read(&self, offset: u16) -> u8 {
        let load = |register: &AtomicU8| register.load(Ordering::Relaxed);
        match offset {
            DATA if self.divisor_selected() => load(&self.divisor[0]),
            INTERRUPT_ENABLE if self.divisor_selected() => load(&self.divisor[1]),
            INTERRUPT_ENABLE => load(&self.interrupt_enable),
            // FIFOs on (0xc0); the transmitter is always empty, so that is what is pending whenever it may be.
            INTERRUPT_ID if load(&self.interrupt_enable) & TRANSMITTER_INTERRUPT != 0 => 0xc2,
            INTERRUPT_ID => 0xc1,
            LINE_CONTROL => load(&self.line_control),
            MODEM_CONTROL => load(&self.modem_control),
            LINE_STATUS => 0x60,  // transmitter empty
            MODEM_STATUS => 0xb0, // carrier, data set ready, clear to send
            SCRATCH => load(&self.scratch),
            _ => 0,
        }
    }

    /// The guest writes register `offset`. Returns whether there is output for the event loop.
    pub fn write(&self, offset: u16, value: u8) -> bool {
        match offset {
            DATA if self.divisor_selected() => self.divisor[0].store(value, Ordering::Relaxed),
            DATA => {
                if self.output.try_send(value).is_err() {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
                self.signal_empty();
                return true;
            }
            INTERRUPT_ENABLE if self.divisor_selected() => self.divisor[1].store(value, Ordering::Relaxed),
            INTERRUPT_ENABLE => {
                self.interrupt_enable.store(value & 0x0f, Ordering::Relaxed);
                self.signal_empty();
            }
            LINE_CONTROL => self.line_control.store(value, Ordering::Relaxed),
            MODEM_CONTROL => self.modem_control.store(value & 0x1f, Ordering::Relaxed),
            SCRATCH => self.scratch.store(value, Ordering::Relaxed),
            _ => {}
        }
        false
    }

    fn divisor_selected(&self) -> bool {
        self.line_control.load(Ordering::Relaxed) & DLAB != 0
    }

    fn signal_empty(&self) {
        if self.interrupt_enable.load(Ordering::Relaxed) & TRANSMITTER_INTERRUPT != 0 {
            // A full counter means that the interrupt is pending already.
            let _ = self.interrupt.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serial() -> (Serial, Receiver<u8>, EventFd) {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let (serial, bytes) = Serial::new(interrupt.try_clone().unwrap());
        (serial, bytes, interrupt)
    }

    #[test]
    fn what_is_written_comes_out() {
        let (serial, bytes, interrupt) = serial();
        assert!(serial.write(DATA, b'a'));
        assert_eq!(bytes.try_recv(), Ok(b'a'));
        assert!(interrupt.read().is_err(), "no interrupt unless asked for");
        serial.write(INTERRUPT_ENABLE, TRANSMITTER_INTERRUPT);
        assert_eq!(interrupt.read().unwrap(), 1);
        assert_eq!(serial.read(INTERRUPT_ID) & 0x0f, 2);
    }

    #[test]
    fn the_divisor_is_not_output() {
        let (serial, bytes, _) = serial();
        serial.write(LINE_CONTROL, DLAB);
        assert!(!serial.write(DATA, 12));
        assert_eq!(serial.read(DATA), 12);
        assert!(bytes.try_recv().is_err());
    }

    #[test]
    fn a_guest_that_prints_without_end_neither_waits_nor_grows() {
        let (serial, bytes, _) = serial();
        for _ in 0..BACKLOG + 10 {
            serial.write(DATA, b'x');
        }
        assert_eq!(serial.dropped(), 10);
        assert_eq!(bytes.try_iter().count(), BACKLOG);
    }

    #[test]
    fn every_register_takes_every_value() {
        let (serial, _bytes, _) = serial();
        for offset in 0..=u16::from(u8::MAX) {
            for value in 0..=u8::MAX {
                serial.write(offset, value);
                serial.read(offset);
            }
        }
    }
}
