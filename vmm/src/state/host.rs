//! Whether this host can go on with a vCPU that another one saved.
//!
//! What the guest was told of its processor has to hold here: each feature that it may use, and the layout of its state. What
//! only describes (caches, model, names) may differ, and stays as it was told.

use kvm_bindings::kvm_cpuid_entry2;

/// How far paces may be apart before the guest's clock is wrong: in millionths.
const MOST_APART: u64 = 250;

/// What this host lacks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The processor is another vendor's.
    #[error("this host's processor is of another vendor than the one it was saved on")]
    Vendor,
    /// A whole leaf.
    #[error("it was saved with CPUID leaf {function:#x}.{index}, which this host does not offer")]
    Leaf {
        /// Leaf.
        function: u32,
        /// Sub-leaf.
        index: u32,
    },
    /// Features.
    #[error(
        "it was saved with the features {bits:#010x} of CPUID leaf {function:#x}.{index} {register}, which this host lacks"
    )]
    Features {
        /// Leaf.
        function: u32,
        /// Sub-leaf.
        index: u32,
        /// Register.
        register: &'static str,
        /// What is missing.
        bits: u32,
    },
    /// A value that has to be the same.
    #[error(
        "it was saved with {saved:#x} in CPUID leaf {function:#x}.{index} {register}, where this host has {here:#x}"
    )]
    Value {
        /// Leaf.
        function: u32,
        /// Sub-leaf.
        index: u32,
        /// Register.
        register: &'static str,
        /// In the state.
        saved: u32,
        /// Of this host.
        here: u32,
    },
    /// The time stamp counter.
    #[error("its time stamp counter runs at {saved} kHz, this host's at {here} kHz, and this host cannot scale it")]
    Pace {
        /// In the state.
        saved: u32,
        /// Of this host.
        here: u32,
    },
}

/// How a register of a leaf is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// It describes.
    Free,
    /// Each bit that is set has to be here.
    Bits,
    /// It is at most what it is here.
    Most,
    /// It is what it is here.
    Same,
}

/// The rules for eax, ebx, ecx and edx.
fn rules(function: u32, index: u32) -> [Rule; 4] {
    use Rule::{Bits, Free, Most, Same};
    match (function, index) {
        (0 | 0x8000_0000, _) => [Most, Same, Same, Same],
        (1, _) => [Free, Free, Bits, Bits],
        (6, _) | (0x8000_0021, _) => [Bits, Free, Free, Free],
        (7, 0) => [Most, Bits, Bits, Bits],
        (7, _) => [Bits, Bits, Bits, Bits],
        (0xd, 0) => [Bits, Free, Free, Bits],
        (0xd, 1) => [Bits, Free, Bits, Bits],
        (0xd, _) => [Same, Same, Same, Same],
        (0x4000_0000, _) => [Same, Same, Same, Same],
        (0x4000_0001, _) => [Bits, Free, Free, Bits],
        (0x8000_0001, _) => [Free, Free, Bits, Bits],
        (0x8000_0007, _) => [Free, Free, Free, Bits],
        (0x8000_0008, _) => [Most, Bits, Free, Free],
        _ => [Free; 4],
    }
}

/// Checks the table that a guest was given against the one that it would be given here.
pub fn check_cpuid(saved: &[kvm_cpuid_entry2], here: &[kvm_cpuid_entry2]) -> Result<(), HostError> {
    for entry in saved {
        let (function, index) = (entry.function, entry.index);
        let same_leaf = |other: &&kvm_cpuid_entry2| (other.function, other.index) == (function, index);
        let Some(own) = here.iter().find(same_leaf).filter(|own| own.flags == entry.flags) else {
            return Err(HostError::Leaf { function, index });
        };
        let registers = [
            ("eax", entry.eax, own.eax),
            ("ebx", entry.ebx, own.ebx),
            ("ecx", entry.ecx, own.ecx),
            ("edx", entry.edx, own.edx),
        ];
        for (rule, (register, saved, here)) in rules(function, index).into_iter().zip(registers) {
            let lacking = saved & !here;
            match rule {
                Rule::Same if saved != here && function == 0 => return Err(HostError::Vendor),
                Rule::Bits if lacking != 0 => {
                    return Err(HostError::Features { function, index, register, bits: lacking });
                }
                Rule::Most if saved > here => return Err(HostError::Value { function, index, register, saved, here }),
                Rule::Same if saved != here => return Err(HostError::Value { function, index, register, saved, here }),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Whether a counter of this pace has to be scaled here. `scales` says that the host can.
pub fn check_pace(saved: u32, here: u32, scales: bool) -> Result<bool, HostError> {
    let apart = u64::from(saved.abs_diff(here)).saturating_mul(1_000_000);
    if apart <= u64::from(here).saturating_mul(MOST_APART) {
        Ok(false)
    } else if scales {
        Ok(true)
    } else {
        Err(HostError::Pace { saved, here })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    #[test]
    fn a_guest_goes_on_where_all_that_it_may_use_is_there() {
        let here = [entry(0, 0, [13, 1, 2, 3]), entry(7, 0, [2, 0xff, 0xff, 0xff]), entry(4, 0, [9; 4])];
        let fewer = [entry(0, 0, [7, 1, 2, 3]), entry(7, 0, [0, 0x0f, 0, 0]), entry(4, 0, [1, 2, 3, 4])];
        assert_eq!(check_cpuid(&fewer, &here), Ok(()));
        assert_eq!(check_cpuid(&here, &here), Ok(()));
        let refused = |entry| check_cpuid(&[entry], &here).unwrap_err();
        assert_eq!(refused(entry(0, 0, [13, 1, 2, 4])), HostError::Vendor);
        assert_eq!(
            refused(entry(7, 0, [0, 0x10f, 0, 0])),
            HostError::Features { function: 7, index: 0, register: "ebx", bits: 0x100 }
        );
        assert_eq!(refused(entry(0xd, 17, [0; 4])), HostError::Leaf { function: 0xd, index: 17 });
        assert!(matches!(refused(entry(0, 0, [14, 1, 2, 3])), HostError::Value { register: "eax", .. }));
        let flagged = kvm_cpuid_entry2 { flags: 2, ..entry(4, 0, [9; 4]) };
        assert_eq!(refused(flagged), HostError::Leaf { function: 4, index: 0 });
    }

    #[test]
    fn the_counters_pace_may_differ_a_little_or_be_scaled() {
        assert_eq!(check_pace(2_000_000, 2_000_000, false), Ok(false));
        assert_eq!(check_pace(2_000_500, 2_000_000, false), Ok(false));
        assert_eq!(check_pace(2_000_501, 2_000_000, true), Ok(true));
        assert_eq!(check_pace(1_999_000, 2_000_000, false), Err(HostError::Pace { saved: 1_999_000, here: 2_000_000 }));
        assert!(check_pace(u32::MAX, 0, false).is_err());
    }
}
