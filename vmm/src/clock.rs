//! The guest's clocks stand still while the machine does.
//!
//! KVM's clock runs on while no vCPU does, and so does the counter (TSC) that most guests read in its place. What both showed when
//! the last vCPU had left the guest is set again before the first enters it, so monotonic time goes on where it stopped, after a
//! pause of a second as after a restore a week later. The wall clock is the agent's to step, once the workload cannot see it.
//!
//! The counter is set by its distance from the host's (`Documentation/virt/kvm/devices/vcpu.rst`, section 4), together with the
//! clock, so that the two do not drift apart and vCPUs keep their distances to a cycle. Kernels before 5.16 lack that, and
//! where the counter is scaled or the host's own is not to be relied on it does not hold: then the counter runs on in a plain pause,
//! and after a restore is what [`crate::state`] wrote into its register.

use kvm_bindings::{KVM_CLOCK_HOST_TSC, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_clock_data, kvm_device_attr};
use kvm_ioctls::{Error, VcpuFd, VmFd};
use vmm_sys_util::ioctl::ioctl_with_ref;

/// `include/uapi/linux/kvm.h`.
const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;
const KVM_GET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee2;

/// What the guest's clocks showed when it stood still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// KVM's clock, in nanoseconds since the first boot.
    pub clock: u64,
    /// The counter of each vCPU at the same moment; empty if it cannot be known.
    pub counters: Vec<u64>,
}

impl Stopped {
    /// Reads them. `scaled` says that the guest's counter does not run at the host's pace.
    pub fn read(vm: &VmFd, vcpus: &[&VcpuFd], scaled: bool) -> Result<Self, Error> {
        let now = vm.get_clock()?;
        let known = now.flags & KVM_CLOCK_HOST_TSC != 0 && !scaled;
        let counter = |vcpu: &&VcpuFd| Some(offset(vcpu)?.wrapping_add(now.host_tsc));
        let counters = if known { vcpus.iter().map(counter).collect::<Option<_>>() } else { None };
        Ok(Self { clock: now.clock, counters: counters.unwrap_or_default() })
    }

    /// Sets them again, as the last thing before the vCPUs run.
    pub fn go_on(&self, vm: &VmFd, vcpus: &[&VcpuFd]) -> Result<(), Error> {
        vm.set_clock(&kvm_clock_data { clock: self.clock, ..Default::default() })?;
        let now = vm.get_clock()?;
        if now.flags & KVM_CLOCK_HOST_TSC != 0 && self.counters.len() == vcpus.len() {
            let passed = u128::from(now.clock.saturating_sub(self.clock));
            for (vcpu, counter) in vcpus.iter().zip(&self.counters) {
                let ticks = passed.saturating_mul(vcpu.get_tsc_khz()?.into()) / 1_000_000;
                let here = counter.wrapping_add(u64::try_from(ticks).unwrap_or(0));
                set_offset(vcpu, here.wrapping_sub(now.host_tsc))?;
            }
        }
        for vcpu in vcpus {
            match vcpu.kvmclock_ctrl() {
                // Without it the guest takes the pause for a lock-up. One that does not use the clock need not be told.
                Err(error) if error.errno() == libc::EINVAL => {}
                other => other?,
            }
        }
        Ok(())
    }
}

fn attribute(value: *const u64) -> kvm_device_attr {
    kvm_device_attr { flags: 0, group: KVM_VCPU_TSC_CTRL, attr: u64::from(KVM_VCPU_TSC_OFFSET), addr: value as u64 }
}

/// The counter's distance from the host's, where the kernel tells.
fn offset(vcpu: &VcpuFd) -> Option<u64> {
    let mut value = 0u64;
    let attribute = attribute(&raw mut value);
    // SAFETY: the kernel writes 8 bytes to the address in the attribute, which is that of `value`, or nothing.
    let result = unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR, &attribute) };
    (result == 0).then_some(value)
}

fn set_offset(vcpu: &VcpuFd, value: u64) -> Result<(), Error> {
    // SAFETY: the kernel reads 8 bytes from the address in the attribute, which is that of `value`.
    let result = unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR, &attribute(&raw const value)) };
    if result == 0 { Ok(()) } else { Err(Error::last()) }
}
