//! Builds a machine from what was saved.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vmm_control::{MAX_MEMORY_FILES, Restore};

use crate::machine::{Board, Descriptors, Machine, MachineError, Parts, Processors, VSOCK, check, create_vm, io, kvm};
use crate::mailbox::Mailbox;
use crate::state::host::{check_cpuid, check_pace};
use crate::state::vcpu::msrs_to_save;
use crate::state::{MachineState, StateError};
use crate::virtio::device::Device;
use crate::{cpuid, generation, memory};

/// Builds it; `descriptors` are in the order of [`vmm_control::Request::Restore`]. What the state says is checked against the request,
/// then against this host, before anything is set; the devices come last, paused. Nothing runs before the event loop starts.
pub fn build(request: &Restore, descriptors: Vec<OwnedFd>, mailbox: &Mailbox) -> Result<Machine, MachineError> {
    let start = Instant::now();
    let config = &request.config;
    check(config)?;
    if usize::from(request.memory_files) > MAX_MEMORY_FILES {
        return Err(MachineError::Config {
            thing: "memory images",
            value: request.memory_files.to_string(),
            limit: format!("at most {MAX_MEMORY_FILES}"),
        });
    }
    let mut descriptors = Descriptors(descriptors.into_iter());
    let kvm_fd = descriptors.next()?;
    let state = MachineState::read(&descriptors.next()?.into())?;
    let images = descriptors.files(request.memory_files)?;
    let parts = Parts::take(config, descriptors)?;
    let (kvm_fd, vm) = create_vm(kvm_fd)?;
    let memory = memory::saved(config.memory, &images)?;
    let mut board = Board::assemble(config, Arc::new(vm), memory, parts, mailbox)?;
    state.facts.check(&board.facts(config))?;
    check_devices(&state, &board)?;

    let (vm, processors) = processors(&kvm_fd, &board.vm, &state)?;
    // The clock before the vCPUs can run, and before the interrupt controllers, in whose state no interrupt is under way.
    kvm("KVM_SET_CLOCK", state.clock.go_on(vm, &processors.vcpus.iter().collect::<Vec<_>>()))?;
    for chip in &state.chips {
        kvm("KVM_SET_IRQCHIP", vm.set_irqchip(chip))?;
    }
    for (index, (transport, saved)) in board.transports.iter_mut().zip(state.devices).enumerate() {
        transport.restore(saved.transport).map_err(|error| MachineError::Device { index, error })?;
    }
    if let Some(Device::Vsock(device)) = board.transports.get_mut(VSOCK).map(|transport| &mut transport.device) {
        io("vsock device", device.restore(state.vsock))?;
    }
    if let (Some(serial), Some(registers)) = (&board.serial, state.serial) {
        serial.restore(registers);
    }
    io("generation id", generation::renew(&board.memory.ram))?;
    generation::tell(&board.vm);
    Ok(board.finish(config, start, processors))
}

/// The devices have to be those of the machine, in their order.
fn check_devices(state: &MachineState, board: &Board) -> Result<(), StateError> {
    let ids = |ids: Vec<u32>| format!("{ids:?}");
    let saved = ids(state.devices.iter().map(|device| device.id).collect());
    let asked = ids(board.transports.iter().map(|transport| transport.device.id()).collect());
    if saved == asked { Ok(()) } else { Err(StateError::Differs { what: "devices".into(), saved, asked }) }
}

/// Makes the vCPUs go on, if all that they need is here.
fn processors<'a>(
    kvm_fd: &Kvm,
    vm: &'a Arc<VmFd>,
    state: &MachineState,
) -> Result<(&'a VmFd, Processors), MachineError> {
    let supported = kvm("KVM_GET_SUPPORTED_CPUID", kvm_fd.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
    for (id, saved) in (0u8..).zip(&state.vcpus) {
        check_cpuid(&saved.cpuid, &cpuid::for_vcpu(supported.as_slice(), id, state.facts.vcpus))?;
    }
    let msrs = msrs_to_save(kvm("KVM_GET_MSR_INDEX_LIST", kvm_fd.get_msr_index_list())?.as_slice());
    let scales = kvm_fd.check_extension(Cap::TscControl);
    let (mut vcpus, mut scaled): (Vec<VcpuFd>, bool) = (Vec::new(), false);
    for (id, saved) in (0u64..).zip(&state.vcpus) {
        let vcpu = kvm("KVM_CREATE_VCPU", vm.create_vcpu(id))?;
        let here = kvm("KVM_GET_TSC_KHZ", vcpu.get_tsc_khz())?;
        if check_pace(saved.tsc_khz, here, scales)? {
            kvm("KVM_SET_TSC_KHZ", vcpu.set_tsc_khz(saved.tsc_khz))?;
            scaled = true;
        }
        vcpus.push(vcpu);
    }
    for (index, (vcpu, saved)) in vcpus.iter().zip(&state.vcpus).enumerate() {
        saved.give(vcpu).map_err(|error| MachineError::Vcpu { vcpu: index, error })?;
    }
    let tables = state.vcpus.iter().map(|saved| saved.cpuid.clone()).collect();
    Ok((vm, Processors { vcpus, tables, msrs, scaled }))
}
