#!/bin/bash
# state.sh IMAGE...: a $BULKHEAD_HOME with the kernels and the named images, for demo, tests and benchmarks. Prints it.
# What takes time to make is cached; the links here name the current ones only, so an upgrade leaves no older kernel.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/common.sh"
"$rig/need" zstd xz-utils lz4 cpio kmod e2fsprogs busybox-static
[ "$(id -u)" = 0 ] || "$rig/need" fakeroot
home=$cache/home
mkdir -p "$home/kernels" "$home/images"

current=()
for series in 6.12 6.1; do
    status=0
    kernel=$("$tree/resources/kernels/fetch.sh" "$cache/kernels" "$series" cloud) || status=$?
    if [ $status = 3 ] && [ $series != 6.12 ]; then
        # Debian drops old series from its newer releases; tests/e2e says which tests need this one.
        echo "state.sh: this Debian release has no $series kernel" >&2
        continue
    fi
    [ $status = 0 ] || exit 1
    current+=("$kernel")
done
find "$home/kernels" -maxdepth 1 -type l -delete
ln -s "${current[@]}" "$home/kernels/"

for image; do
    recipe=$tree/resources/images/$image.sh
    [ "$image" != fio ] || "$rig/need" fio
    key=$(cat "$recipe" "$tree/resources/images/image.sh" /bin/busybox | sha256sum | cut -c1-16)
    dir=$cache/images/$image-$key
    [ -e "$dir/image.json" ] || "$recipe" "$dir"
    ln -sfnT "$dir" "$home/images/$image"
done
echo "$home"
