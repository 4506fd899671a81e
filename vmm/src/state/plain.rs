//! Structures of KVM's interface as the bytes that they are.
//!
//! What a save keeps of a vCPU is what the kernel gave, and the kernel checks it when it is set: to take each structure apart into
//! fields would add lines and no check.

use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};

/// A structure without padding and without pointers, of which any bytes are a value.
///
/// # Safety
/// It has to be so. (The kvm-bindings crate derives as much for each of these, with its feature `serde`.)
pub(super) unsafe trait Plain: Sized {}

macro_rules! plain {
    ($($kind:ty)*) => { $(
        // SAFETY: fields of integers, explicit padding, no gap between them: `include/uapi/asm/kvm.h`.
        unsafe impl Plain for $kind {}
    )* };
}

plain! {
    kvm_cpuid_entry2 kvm_debugregs kvm_irqchip kvm_lapic_state kvm_mp_state kvm_regs kvm_sregs kvm_vcpu_events kvm_xcrs
    kvm_xsave
}

/// Its bytes.
pub(super) fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: the bytes are those of `value`, which outlives the borrow, and none of them is padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// The structure that these bytes are, if they are as many.
pub(super) fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    // SAFETY: there are so many bytes, and any are a value.
    Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
}
