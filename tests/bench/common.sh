# Sourced by the benchmarks, inside the KVM host: both sides of each comparison, and the arithmetic.
# shellcheck shell=bash
# shellcheck disable=SC2034 # used by those who source it
: "${BULKHEAD_HOME:?}" "${BULKHEAD_DIST:?}"
bench=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
bulkhead=$BULKHEAD_DIST/bin/bulkhead
kernel=$(printf "%s\n" "$BULKHEAD_HOME"/kernels/names/* | sort -V | tail -1)
work=$(mktemp -d "${SCRATCH:-${TMPDIR:-/tmp}}/bench.XXXXXX")
trap 'rm -rf "$work"' EXIT
# Both sides read the same files; neither pays for fetching them first.
cp "$kernel"/{vmlinux,modules.cpio} "$BULKHEAD_DIST/lib/bulkhead/agent.cpio" "$work/"

# What the supervisor gives a guest without console (cli/src/supervisor/machine.rs); the agent's own file name would do.
cmdline="8250.nr_uarts=0 quiet loglevel=0 reboot=t panic=-1 oops=panic pci=off cryptomgr.notests random.trust_cpu=on tsc=reliable"

# Input that never comes and never ends.
mkfifo "$work/silence"
exec 8<>"$work/silence"

# qemu DISK INITRD: QEMU's leanest machine, its output on a virtio console. max_ports=1 spares the console its handshake
# over ports, and gives the guest its /dev/hvc0 as soon as the driver is in. Variants with qboot, and without option
# ROMs, measured alike; without ACPI a distribution kernel finds no device.
qemu_command() {
    command=(qemu-system-x86_64 -M "microvm,acpi=on,pit=off,pic=off,rtc=off,isa-serial=off" -accel kvm -cpu host -smp 1 -m 1024
        -nodefaults -no-user-config -display none -kernel "$work/vmlinux" -initrd "$2" -append "$cmdline"
        -device "virtio-serial-device,max_ports=1" -chardev "stdio,id=console" -device "virtconsole,chardev=console"
        -drive "file=$1,if=none,id=root,format=raw,cache=writeback,aio=threads" -device "virtio-blk-device,drive=root")
}

# median: of the numbers on standard input, one a line.
median() {
    sort -n | awk '{ v[NR] = $1 } END { if (NR) print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

# ratio A B: A / B to two places.
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.2f", a / b }'; }
