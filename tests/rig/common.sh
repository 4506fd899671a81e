# Sourced by the rig's scripts: where things are, and which packages they come from.
# shellcheck shell=bash disable=SC2034

tree=$(readlink -f "$(dirname "${BASH_SOURCE[0]}")/../..")
rig=$tree/tests/rig
cache=${XDG_CACHE_HOME:-$HOME/.cache}/bulkhead
PATH=$PATH:/usr/sbin:/sbin

# The host's own kernel, and what it takes to unpack and run it.
host_series=6.12
rig_packages=(qemu-system-x86 busybox-static cpio gzip zstd xz-utils lz4 kmod e2fsprogs xfsprogs gcc libc6-dev)
