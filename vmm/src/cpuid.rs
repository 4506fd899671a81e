//! What the guest learns about its CPU: an allow-list.
//!
//! KVM says what it could offer; only what stands here passes. So a new host CPU or kernel brings no feature into
//! guests by itself, and the guest's view is the same across similar hosts. Left out on purpose: nested
//! virtualisation, transactional memory, AMX (8 KiB of state, permission from the host), CET (KVM does not
//! save the shadow-stack pointer among the MSRs), MONITOR and WAITPKG (a guest could idle a physical core),
//! performance counters, RDT, SGX, asynchronous page faults (their MSRs make a restore fragile).
//! Bit positions: Intel SDM volume 2A, CPUID; AMD APM volume 3, appendix E; `Documentation/virt/kvm/x86/cpuid.rst`.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Highest basic leaf that the guest sees.
const MAX_BASIC: u32 = 0xd;
/// Highest extended leaf that the guest sees.
const MAX_EXTENDED: u32 = 0x8000_0021;

/// State components that the guest may use: x87, SSE, AVX, AVX-512 and protection keys.
const XCR0: u32 = 0b10_1110_0111;

const LEAF_1_ECX: u32 = bits(&[0, 1, 9, 12, 13, 17, 19, 20, 21, 22, 23, 25, 26, 27, 28, 29, 30]);
const LEAF_1_EDX: u32 = bits(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 19, 23, 24, 25, 26, 27]);
const LEAF_7_EBX: u32 = bits(&[0, 1, 3, 5, 6, 7, 8, 9, 10, 13, 16, 17, 18, 19, 20, 21, 23, 24, 28, 29, 30, 31]);
const LEAF_7_ECX: u32 = bits(&[1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 14, 16, 22]);
const LEAF_7_EDX: u32 = bits(&[4, 10, 14, 26, 27, 28, 29, 31]);
const LEAF_7_1_EAX: u32 = bits(&[4, 5, 10, 11, 12, 23]);
const LEAF_7_2_EDX: u32 = bits(&[0, 1, 2, 4, 5]);
const LEAF_D_1_EAX: u32 = bits(&[0, 1, 2, 3]);
/// Clock sources, no I/O delay, steal time, end of interrupt, unhalt, TLB flush, IPIs, poll control, yield, and
/// that the clock is stable.
const KVM_FEATURES: u32 = bits(&[0, 1, 3, 5, 6, 7, 9, 11, 12, 13, 24]);
const LEAF_80000001_ECX: u32 = bits(&[0, 4, 5, 6, 7, 8, 22]);
const LEAF_80000001_EDX: u32 = 0x0183_f3ff | bits(&[11, 20, 22, 25, 26, 27, 29]);
const LEAF_80000007_EDX: u32 = bits(&[8]);
const LEAF_80000008_EBX: u32 = bits(&[0, 2, 9, 12, 14, 15, 17, 19, 24, 25, 26, 28, 29]);
const LEAF_80000021_EAX: u32 = bits(&[0, 2, 6, 8, 27, 28, 29]);

/// The same brand string on every host.
const BRAND: &[u8; 48] = b"Bulkhead virtual CPU\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

const fn bits(positions: &[u32]) -> u32 {
    let mut mask = 0;
    let mut at = 0;
    while at < positions.len() {
        mask |= 1 << positions[at];
        at += 1;
    }
    mask
}

/// The guest's CPUID table for one vCPU, from what KVM supports.
pub fn for_vcpu(supported: &[kvm_cpuid_entry2], vcpu: u8, vcpus: u8) -> Vec<kvm_cpuid_entry2> {
    let is_amd = supported.iter().any(|entry| entry.function == 0 && entry.ecx == u32::from_le_bytes(*b"cAMD"));
    let mut table: Vec<_> = supported.iter().filter_map(|entry| filter(*entry, vcpu, vcpus, is_amd)).collect();
    // KVM reports leaf 0xb as the host's topology; the guest's is one thread a core, all in one package.
    table.extend((0..3).map(|level| topology(level, vcpu, vcpus)));
    table
}

fn filter(entry: kvm_cpuid_entry2, vcpu: u8, vcpus: u8, is_amd: bool) -> Option<kvm_cpuid_entry2> {
    let mut e = entry;
    let last_core = u32::from(vcpus.saturating_sub(1));
    match (e.function, e.index) {
        (0, _) => e.eax = e.eax.min(MAX_BASIC),
        (1, _) => {
            let ids = u32::from(vcpus).next_power_of_two();
            e.ebx = u32::from(vcpu) << 24 | ids << 16 | e.ebx & 0xff00;
            // Bit 24 is the TSC deadline timer, which KVM provides but does not report; 31 says "hypervisor".
            e.ecx = e.ecx & LEAF_1_ECX | bits(&[24, 31]);
            e.edx &= LEAF_1_EDX;
            if vcpus > 1 {
                e.edx |= bits(&[28]);
            }
        }
        (2, _) => {}
        (4, _) => {
            // Caches up to level 2 belong to one core, level 3 to all.
            let sharing = if e.eax >> 5 & 7 < 3 { 0 } else { last_core };
            e.eax = e.eax & 0x3fff | sharing << 14 | last_core << 26;
        }
        (6, _) => (e.eax, e.ebx, e.ecx, e.edx) = (e.eax & bits(&[2]), 0, 0, 0),
        (7, 0) => {
            e.eax = e.eax.min(2);
            e.ebx &= LEAF_7_EBX;
            e.ecx &= LEAF_7_ECX;
            e.edx &= if is_amd { LEAF_7_EDX & !bits(&[29]) } else { LEAF_7_EDX };
        }
        (7, 1) => (e.eax, e.ebx, e.ecx, e.edx) = (e.eax & LEAF_7_1_EAX, 0, 0, 0),
        (7, 2) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, e.edx & LEAF_7_2_EDX),
        (0xd, 0) => (e.eax, e.edx) = (e.eax & XCR0, 0),
        (0xd, 1) => (e.eax, e.ecx, e.edx) = (e.eax & LEAF_D_1_EAX, 0, 0),
        (0xd, component) if component < 32 && 1 << component & XCR0 != 0 => {}
        (0x4000_0000, _) => e.eax = 0x4000_0001,
        (0x4000_0001, _) => (e.eax, e.edx) = (e.eax & KVM_FEATURES, 0),
        (0x8000_0000, _) => e.eax = e.eax.min(MAX_EXTENDED),
        (0x8000_0001, _) => (e.ecx, e.edx) = (e.ecx & LEAF_80000001_ECX, e.edx & LEAF_80000001_EDX),
        (leaf @ 0x8000_0002..=0x8000_0004, _) => {
            let start = (leaf & 0xf).saturating_sub(2) as usize * 16;
            let word = |n: usize| {
                let bytes = BRAND.get(start + 4 * n..).and_then(|rest| rest.first_chunk::<4>());
                bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
            };
            (e.eax, e.ebx, e.ecx, e.edx) = (word(0), word(1), word(2), word(3));
        }
        (0x8000_0005 | 0x8000_0006, _) => {}
        (0x8000_0007, _) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, e.edx & LEAF_80000007_EDX),
        (0x8000_0008, _) => {
            let id_bits = u32::from(vcpus).next_power_of_two().trailing_zeros();
            (e.ebx, e.ecx, e.edx) = (e.ebx & LEAF_80000008_EBX, id_bits << 12 | last_core, 0);
        }
        (0x8000_001d, _) => {
            let sharing = if e.eax >> 5 & 7 < 3 { 0 } else { last_core };
            e.eax = e.eax & 0x3fff | sharing << 14;
        }
        (0x8000_001e, _) => (e.eax, e.ebx, e.ecx, e.edx) = (u32::from(vcpu), u32::from(vcpu), 0, 0),
        (0x8000_0021, _) => (e.eax, e.ebx, e.ecx, e.edx) = (e.eax & LEAF_80000021_EAX, 0, 0, 0),
        _ => return None,
    }
    Some(e)
}

/// Leaf 0xb: level 0 is threads of a core (one), level 1 is cores of the package (all).
fn topology(level: u32, vcpu: u8, vcpus: u8) -> kvm_cpuid_entry2 {
    let (shift, count, kind) = match level {
        0 => (0, 1, 1),
        1 => (u32::from(vcpus).next_power_of_two().trailing_zeros(), u32::from(vcpus), 2),
        _ => (0, 0, 0),
    };
    kvm_cpuid_entry2 {
        function: 0xb,
        index: level,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind << 8 | level,
        edx: u32::from(vcpu),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(function: u32, index: u32, value: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax: value, ebx: value, ecx: value, edx: value, ..Default::default() }
    }

    fn find(table: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        *table.iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn a_host_that_offers_everything_gives_only_what_is_listed() {
        let all = u32::MAX;
        let host: Vec<_> = [(0, 0), (1, 0), (7, 0), (7, 1), (0xd, 0), (0xd, 1), (0xd, 9), (0xd, 17), (0xd, 18)]
            .into_iter()
            .chain([(0xa, 0), (0x10, 0), (0x12, 0), (0x14, 0), (0x1f, 0), (0x4000_0001, 0), (0x8000_000a, 0)])
            .chain([(0x8000_0001, 0), (0x8000_001f, 0)])
            .map(|(function, index)| entry(function, index, all))
            .collect();
        let table = for_vcpu(&host, 1, 2);
        for absent in [0xa, 0x10, 0x12, 0x14, 0x1f, 0x8000_000a, 0x8000_001f] {
            assert!(table.iter().all(|e| e.function != absent), "{absent:#x}");
        }
        assert!(table.iter().all(|e| (e.function, e.index) != (0xd, 17)), "AMX state");
        let leaf = find(&table, 1, 0);
        for (bit, what) in [(3, "MONITOR"), (5, "VMX"), (15, "PDCM")] {
            assert_eq!(leaf.ecx >> bit & 1, 0, "{what}");
        }
        assert_eq!(leaf.ebx >> 24, 1);
        let leaf = find(&table, 7, 0);
        for (bit, what) in [(2, "SGX"), (4, "HLE"), (11, "RTM"), (25, "PT")] {
            assert_eq!(leaf.ebx >> bit & 1, 0, "{what}");
        }
        for (bit, what) in [(5, "WAITPKG"), (7, "CET shadow stack")] {
            assert_eq!(leaf.ecx >> bit & 1, 0, "{what}");
        }
        for (bit, what) in [(20, "CET IBT"), (22, "AMX BF16"), (24, "AMX tile"), (25, "AMX int8")] {
            assert_eq!(leaf.edx >> bit & 1, 0, "{what}");
        }
        assert_eq!(find(&table, 0x8000_0001, 0).ecx >> 2 & 1, 0, "SVM");
        for (bit, what) in [(4, "async page fault"), (10, "async page fault exits"), (14, "async page fault interrupt")]
        {
            assert_eq!(find(&table, 0x4000_0001, 0).eax >> bit & 1, 0, "{what}");
        }
        assert_eq!(find(&table, 0, 0).eax, MAX_BASIC);
    }

    #[test]
    fn what_the_host_lacks_stays_absent() {
        let table = for_vcpu(&[entry(1, 0, 0), entry(7, 0, 0)], 0, 1);
        assert_eq!(find(&table, 1, 0).ecx, bits(&[24, 31]));
        assert_eq!(find(&table, 7, 0).ebx, 0);
    }

    #[test]
    fn the_topology_is_one_thread_a_core_in_one_package() {
        let table = for_vcpu(&[], 5, 6);
        assert_eq!((find(&table, 0xb, 0).eax, find(&table, 0xb, 0).ebx), (0, 1));
        assert_eq!((find(&table, 0xb, 1).eax, find(&table, 0xb, 1).ebx), (3, 6));
        assert_eq!(find(&table, 0xb, 2).ecx >> 8, 0);
        assert!(table.iter().all(|e| e.edx == 5));
    }

    proptest! {
        /// No feature word of any leaf ever gains a bit that KVM did not offer, but for the two named ones.
        #[test]
        fn nothing_is_invented(value: u32, function in prop::sample::select(vec![7u32, 0x8000_0001, 0x8000_0021])) {
            let table = for_vcpu(&[entry(function, 0, value)], 0, 4);
            let e = find(&table, function, 0);
            prop_assert_eq!(e.ecx & !value, 0);
            prop_assert_eq!(e.edx & !value, 0);
            prop_assert_eq!(e.ebx & !value, 0);
        }
    }
}
