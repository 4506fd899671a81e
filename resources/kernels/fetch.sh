#!/bin/bash
# fetch.sh DEST SERIES FLAVOUR: makes a guest kernel out of Debian's package, as bulkhead stores it:
#
#   DEST/VERSION/vmlinux       the kernel, unpacked: it is entered by PVH, so nothing is decompressed at boot
#   DEST/VERSION/modules.cpio  modules/order and the modules that our devices need, uncompressed
#   DEST/VERSION/kernel.json   which release, from which package
#
# VERSION is the package's. Prints DEST/VERSION. Exit status 3: the package sources have no such kernel.
set -euo pipefail
dest=$1 series=$2 flavour=$3
here=$(dirname "$(readlink -f "$0")")
PATH=$PATH:/usr/sbin:/sbin

package=$("$here/package.sh" "$series" "$flavour")
version=${package##*_}
out=$dest/$version
if [ -e "$out/kernel.json" ]; then
    echo "$out"
    exit
fi
mkdir -p "$dest"
work=$(mktemp -d "$dest/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/out" "$work/initrd" "$work/initrd/modules"

release=$(echo "$package"/lib/modules/*)
release=${release##*/}

# number FILE OFFSET BYTES: a little-endian number of a file's header.
number() { od -An -v -t "u$3" -j "$2" -N "$3" "$1" | tr -d ' '; }

# unpack BZIMAGE: the ELF file inside, by the boot protocol's header fields setup_sects, payload_offset, payload_length.
unpack() {
    local image=$1 start length tool
    start=$((($(number "$image" $((0x1f1)) 1) + 1) * 512 + $(number "$image" $((0x248)) 4)))
    length=$(number "$image" $((0x24c)) 4)
    case $(od -An -v -t x1 -j "$start" -N 4 "$image" | tr -d ' ') in
    28b52ffd) tool=zstd ;;
    02214c18) tool=lz4 ;;
    fd377a58) tool=xz ;;
    1f8b*) tool=gzip ;;
    *)
        echo "fetch.sh: $image: unknown compression" >&2
        return 1
        ;;
    esac
    # The kernel's build appends the unpacked size, four bytes, to all formats that do not end with it (gzip does).
    [ $tool = gzip ] || length=$((length - 4))
    tail -c +$((start + 1)) "$image" | head -c "$length" | $tool -dc
}

# tail is killed by a closed pipe when it has more than head wants; that is no error.
(set +o pipefail; unpack "$package/boot/vmlinuz-$release") >"$work/out/vmlinux"
if [ "$(od -An -t x1 -N 4 "$work/out/vmlinux" | tr -d ' ')" != 7f454c46 ]; then
    echo "fetch.sh: the kernel of $package did not unpack to an ELF file" >&2
    exit 1
fi

# Load order matters: the agent listens as soon as vsock is in, and the transport comes last, so a host that connects
# once the device is up always finds the listener.
for module in vsock virtio_mmio virtio_blk virtio_rng vmw_vsock_virtio_transport; do
    modprobe -d "$package" -S "$release" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p' | while read -r path; do
        file=${path##*/}
        file=${file%%.ko*}.ko
        [ -e "$work/initrd/modules/$file" ] && continue
        case $path in
        *.xz) xz -dc "$path" ;;
        *.zst) zstd -qdc "$path" ;;
        *) cat "$path" ;;
        esac >"$work/initrd/modules/$file"
        echo "$file" >>"$work/initrd/modules/order"
    done
done
"$here/cpio.sh" "$work/initrd" >"$work/out/modules.cpio"
printf '{"release": "%s", "package": "%s"}\n' "$release" "${package##*/}" >"$work/out/kernel.json"
mv -T "$work/out" "$out" 2>/dev/null || [ -e "$out/kernel.json" ]
echo "$out"
