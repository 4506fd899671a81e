/*
 * Holds KVM's static keys on for as long as the rig lives.
 *
 * KVM patches kernel code when the first vCPU without a local APIC comes or the last one goes, and likewise for an APIC
 * that is software-disabled. QEMU's emulated CPUs race on the patched bytes, and the kernel dies of "Oops: int3".
 * One machine of each kind, never run, keeps the code as it is.
 */
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

static int create_machine(int kvm, int with_irqchip)
{
	int vm = ioctl(kvm, KVM_CREATE_VM, 0);

	if (vm < 0 || (with_irqchip && ioctl(vm, KVM_CREATE_IRQCHIP, 0) < 0))
		return -1;
	return ioctl(vm, KVM_CREATE_VCPU, 0);
}

int main(void)
{
	int kvm = open("/dev/kvm", O_RDWR);

	if (kvm < 0 || create_machine(kvm, 1) < 0 || create_machine(kvm, 0) < 0) {
		perror("keeper: /dev/kvm");
		return 1;
	}
	if (fork() != 0)
		return 0;
	setsid();
	for (;;)
		pause();
}
