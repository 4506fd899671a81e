#!/bin/bash
# setup.sh: makes the rig's pieces, once: kernel, initramfs. Prints the directory that holds them.
# It is named by what it was made from, so a change of any of them makes a new one.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/common.sh"
"$rig/need" "${rig_packages[@]}"

package=$("$tree/resources/kernels/package.sh" "$host_series")
key=$(cat "$rig"/{setup.sh,init,start,keeper.c} /bin/busybox | cat - <(echo "$package") | sha256sum | cut -c1-16)
out=$cache/rig/$key
if [ -e "$out/initramfs" ]; then
    echo "$out"
    exit
fi
mkdir -p "$cache/rig"
work=$(mktemp -d "$cache/rig/new.XXXXXX")
trap 'rm -rf "$work"' EXIT
release=$(echo "$package"/lib/modules/*)
release=${release##*/}

# What it takes to reach the shared tree, in load order; everything else is loaded from the package itself, once that is
# mounted.
root=$work/root
mkdir -p "$root/bin" "$root/modules"
for module in 9p 9pnet_virtio virtio_blk ext4 xfs overlay; do
    modprobe -d "$package" -S "$release" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | while read -r path; do
    file=${path##*/}
    file=${file%.xz}
    [ ! -e "$root/modules/$file" ] || continue
    xz -dc "$path" >"$root/modules/$file"
    echo "$file" >>"$root/modules/order"
done
cp "$rig/init" "$rig/start" "$root/"
cp /bin/busybox "$root/bin/"
gcc -O1 -static -Wall -o "$root/keeper" "$rig/keeper.c"

mkdir "$work/out"
"$tree/resources/kernels/cpio.sh" "$root" | gzip -1 >"$work/out/initramfs"
ln -s "$package/boot/vmlinuz-$release" "$work/out/kernel"
ln -s "$package/lib/modules" "$work/out/modules"
mv -T "$work/out" "$out" 2>/dev/null || [ -e "$out/initramfs" ]
echo "$out"
