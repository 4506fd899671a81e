//! One vCPU: taken from KVM, and given to it again, each in the order that KVM needs.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use super::StateError;
use super::bytes::{Reader, Writer};

/// Most model-specific registers of a vCPU.
const MAX_MSRS: usize = 256;
/// The time stamp counter, and when it shall interrupt.
const TSC: u32 = 0x10;
const TSC_DEADLINE: u32 = 0x6e0;

/// The model-specific registers that are part of a guest's state, by first and last. Not among them: what KVM saves elsewhere (the
/// APIC's base, EFER), what only configures what guests do not have (VMX, performance counters, Hyper-V, AMX), what a processor
/// says about itself. Intel SDM volume 4; AMD APM volume 2, appendix A; `Documentation/virt/kvm/x86/msr.rst`.
const MSRS: &[(u32, u32)] = &[
    (TSC, TSC),
    (0x3b, 0x3b),   // TSC_ADJUST
    (0x48, 0x48),   // SPEC_CTRL
    (0x122, 0x122), // TSX_CTRL
    (0x140, 0x140), // MISC_FEATURES_ENABLES
    (0x174, 0x176), // SYSENTER
    (0x17a, 0x17b), // MCG_STATUS, MCG_CTL
    (0x1a0, 0x1a0), // MISC_ENABLE
    (0x1d9, 0x1d9), // DEBUGCTL
    (0x200, 0x20f), // variable MTRRs
    (0x250, 0x250), // fixed MTRRs
    (0x258, 0x259),
    (0x268, 0x26f),
    (0x277, 0x277), // PAT
    (0x2ff, 0x2ff), // MTRR default
    (TSC_DEADLINE, TSC_DEADLINE),
    (0xda0, 0xda0),             // XSS
    (0x4b56_4d00, 0x4b56_4d08), // KVM's own: clocks, steal time, end of interrupt, polling
    (0xc000_0081, 0xc000_0084), // STAR, LSTAR, CSTAR, FMASK
    (0xc000_0100, 0xc000_0103), // FS, GS, kernel GS, TSC_AUX
    (0xc001_0015, 0xc001_0015), // HWCR
    (0xc001_011f, 0xc001_011f), // VIRT_SPEC_CTRL
    (0xc001_0140, 0xc001_0141), // OSVW
];

/// Registers that KVM keeps, and does not list.
const NOT_LISTED: &[(u32, u32)] = &[(0x200, 0x20f), (0x250, 0x250), (0x258, 0x259), (0x268, 0x26f), (0x2ff, 0x2ff)];

/// The registers to save, of those that this host's KVM lists.
pub fn msrs_to_save(listed: &[u32]) -> Vec<u32> {
    let known = |index: &u32| MSRS.iter().any(|(first, last)| (*first..=*last).contains(index));
    let more = NOT_LISTED.iter().flat_map(|(first, last)| *first..=*last);
    let mut all: Vec<u32> = listed.iter().copied().filter(known).chain(more).collect();
    all.sort_unstable();
    all.dedup();
    all.truncate(MAX_MSRS);
    all
}

/// A call of KVM's that failed.
#[derive(Debug, thiserror::Error)]
#[error("KVM: {what}: {error}")]
pub struct CallError {
    /// Which.
    pub what: String,
    /// Why.
    pub error: kvm_ioctls::Error,
}

fn call<T>(what: &str, result: Result<T, kvm_ioctls::Error>) -> Result<T, CallError> {
    result.map_err(|error| CallError { what: what.into(), error })
}

/// A vCPU that does not run.
#[derive(Debug)]
pub struct VcpuState {
    /// What it was told of its processor.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// The pace of its time stamp counter, in kHz.
    pub tsc_khz: u32,
    /// Its model-specific registers: index and value.
    pub msrs: Vec<(u32, u64)>,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Box<kvm_xsave>,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
}

impl VcpuState {
    /// Takes it. All vCPUs stand still, and the devices do.
    pub fn take(vcpu: &VcpuFd, cpuid: &[kvm_cpuid_entry2], msrs: &[u32]) -> Result<Self, CallError> {
        // It comes first because it delivers what waits for the local APIC, the events last because the others change them.
        let mp_state = call("KVM_GET_MP_STATE", vcpu.get_mp_state())?;
        Ok(Self {
            cpuid: cpuid.to_vec(),
            mp_state,
            regs: call("KVM_GET_REGS", vcpu.get_regs())?,
            sregs: call("KVM_GET_SREGS", vcpu.get_sregs())?,
            // Fails where a guest has more state than fits: none of ours is offered that.
            xsave: Box::new(call("KVM_GET_XSAVE", vcpu.get_xsave())?),
            xcrs: call("KVM_GET_XCRS", vcpu.get_xcrs())?,
            debugregs: call("KVM_GET_DEBUGREGS", vcpu.get_debug_regs())?,
            lapic: call("KVM_GET_LAPIC", vcpu.get_lapic())?,
            tsc_khz: call("KVM_GET_TSC_KHZ", vcpu.get_tsc_khz())?,
            msrs: take_msrs(vcpu, msrs)?,
            events: call("KVM_GET_VCPU_EVENTS", vcpu.get_vcpu_events())?,
        })
    }

    /// Gives it to a fresh vCPU. Memory is there already, because some registers point into it.
    pub fn give(&self, vcpu: &VcpuFd) -> Result<(), CallError> {
        // CPUID before all that depends on it. The APIC's base is among the special registers, so its state comes after them; the
        // deadline is armed through the APIC and against the counter; general registers clear pending exceptions.
        let table = CpuId::from_entries(&self.cpuid)
            .map_err(|_| CallError { what: "KVM_SET_CPUID2".into(), error: kvm_ioctls::Error::new(libc::E2BIG) })?;
        call("KVM_SET_CPUID2", vcpu.set_cpuid2(&table))?;
        call("KVM_SET_MP_STATE", vcpu.set_mp_state(self.mp_state))?;
        call("KVM_SET_REGS", vcpu.set_regs(&self.regs))?;
        call("KVM_SET_SREGS", vcpu.set_sregs(&self.sregs))?;
        // SAFETY: no state component was enabled for this process beyond those that fit into the structure.
        call("KVM_SET_XSAVE", unsafe { vcpu.set_xsave(&self.xsave) })?;
        call("KVM_SET_XCRS", vcpu.set_xcrs(&self.xcrs))?;
        call("KVM_SET_DEBUGREGS", vcpu.set_debug_regs(&self.debugregs))?;
        call("KVM_SET_LAPIC", vcpu.set_lapic(&self.lapic))?;
        let (deadline, others): (Vec<_>, Vec<_>) = self.msrs.iter().partition(|(index, _)| *index == TSC_DEADLINE);
        give_msrs(vcpu, &others)?;
        give_msrs(vcpu, &deadline)?;
        call("KVM_SET_VCPU_EVENTS", vcpu.set_vcpu_events(&self.events))
    }

    pub(super) fn write(&self, to: &mut Writer) {
        to.plain(&self.mp_state);
        to.plain(&self.regs);
        to.plain(&self.sregs);
        to.plain(&*self.xsave);
        to.plain(&self.xcrs);
        to.plain(&self.debugregs);
        to.plain(&self.lapic);
        to.plain(&self.events);
        to.u32(self.tsc_khz);
        to.u16(u16::try_from(self.cpuid.len()).unwrap_or(u16::MAX));
        self.cpuid.iter().for_each(|entry| to.plain(entry));
        to.u16(u16::try_from(self.msrs.len()).unwrap_or(u16::MAX));
        for (index, value) in &self.msrs {
            to.u32(*index);
            to.u64(*value);
        }
    }

    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self, StateError> {
        let mp_state = from.plain()?;
        let (regs, sregs, xsave) = (from.plain()?, from.plain()?, Box::new(from.plain()?));
        let (xcrs, debugregs, lapic, events) = (from.plain()?, from.plain()?, from.plain()?, from.plain()?);
        let tsc_khz = from.u32()?;
        let entries = from.count("CPUID entries:", KVM_MAX_CPUID_ENTRIES)?;
        let cpuid = (0..entries).map(|_| from.plain()).collect::<Result<_, _>>()?;
        let count = from.count("model-specific registers:", MAX_MSRS)?;
        let msrs = (0..count).map(|_| Ok((from.u32()?, from.u64()?))).collect::<Result<_, StateError>>()?;
        Ok(Self { cpuid, tsc_khz, msrs, mp_state, regs, sregs, xsave, xcrs, debugregs, lapic, events })
    }
}

#[cfg(test)]
pub(super) const MSRS_OF_TESTS: &[(u32, u64)] = &[(TSC, 5), (TSC_DEADLINE, 6)];

#[cfg(test)]
impl VcpuState {
    pub(super) fn of_tests() -> Self {
        Self {
            cpuid: vec![kvm_cpuid_entry2 { function: 7, eax: 9, ..Default::default() }],
            tsc_khz: 2_000_000,
            msrs: MSRS_OF_TESTS.to_vec(),
            mp_state: kvm_mp_state::default(),
            regs: kvm_regs { rip: 0x1234, ..Default::default() },
            sregs: kvm_sregs::default(),
            xsave: Box::default(),
            xcrs: kvm_xcrs::default(),
            debugregs: kvm_debugregs::default(),
            lapic: kvm_lapic_state::default(),
            events: kvm_vcpu_events::default(),
        }
    }
}

/// Reads registers. KVM reads them in order and stops at one that it lists and cannot read: that one is left out.
fn take_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, CallError> {
    let mut taken = Vec::new();
    let mut rest = indices;
    while !rest.is_empty() {
        let entries: Vec<_> = rest.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut list = Msrs::from_entries(&entries)
            .map_err(|_| CallError { what: "KVM_GET_MSRS".into(), error: kvm_ioctls::Error::new(libc::E2BIG) })?;
        let count = call("KVM_GET_MSRS", vcpu.get_msrs(&mut list))?;
        taken.extend(list.as_slice().iter().take(count).map(|entry| (entry.index, entry.data)));
        rest = rest.get(count.saturating_add(1)..).unwrap_or_default();
    }
    // A deadline that has passed reads 0, and its interrupt may not have reached the APIC: one that has just passed brings it.
    let now = taken.iter().find(|(index, _)| *index == TSC).map_or(0, |(_, value)| *value);
    for (_, value) in taken.iter_mut().filter(|(index, value)| *index == TSC_DEADLINE && *value == 0) {
        *value = now;
    }
    Ok(taken)
}

/// Writes registers, every one of which has to be taken.
fn give_msrs(vcpu: &VcpuFd, msrs: &[&(u32, u64)]) -> Result<(), CallError> {
    let refused = |index: u32| CallError {
        what: format!("KVM_SET_MSRS: register {index:#x} was refused"),
        error: kvm_ioctls::Error::new(libc::EINVAL),
    };
    if let Some((index, _)) = msrs.iter().find(|(index, _)| !MSRS.iter().any(|(a, b)| (*a..=*b).contains(index))) {
        return Err(refused(*index));
    }
    let entry = |(index, data): &&(u32, u64)| kvm_msr_entry { index: *index, data: *data, ..Default::default() };
    let list = Msrs::from_entries(&msrs.iter().map(entry).collect::<Vec<_>>())
        .map_err(|_| CallError { what: "KVM_SET_MSRS".into(), error: kvm_ioctls::Error::new(libc::E2BIG) })?;
    let count = call("KVM_SET_MSRS", vcpu.set_msrs(&list))?;
    match msrs.get(count) {
        None => Ok(()),
        Some((index, _)) => Err(refused(*index)),
    }
}
