#!/bin/bash
# state.sh IMAGE...: a $BULKHEAD_HOME with the kernels and the named images, for demo, tests and benchmarks. Prints it.
# It needs what `make build` builds. What takes time to make is cached; what is not current is removed, so an upgrade
# leaves no older kernel.
#
#   kernels/         imported from Debian's packages by bulkhead; the newest with all of its modules
#   images/          see resources/images
#   packages/        the packages' files, and "unpacked", another kernel with its modules: what the tests import
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/common.sh"
"$rig/need" cpio kmod e2fsprogs busybox-static
[ "$(id -u)" = 0 ] || "$rig/need" fakeroot
bulkhead=${BULKHEAD_DIST:-${CARGO_TARGET_DIR:-$tree/target}/dist}/bin/bulkhead
if [ ! -x "$bulkhead" ]; then
    echo "state.sh: $bulkhead is not there; run: make build" >&2
    exit 1
fi
export BULKHEAD_HOME=$cache/state
home=$BULKHEAD_HOME
mkdir -p "$home/packages" "$home/images"
exec 9>"$home/.lock"
flock 9

# A package is imported once by each build of the program, since another may make something else of it. What it makes
# again is recognised.
build=$(sha256sum <"$bulkhead" | cut -c1-16)
current=()
for series in 6.12 6.1; do
    status=0
    package=$("$tree/resources/kernels/package.sh" -f "$series" cloud) || status=$?
    if [ $status = 3 ] && [ $series != 6.12 ]; then
        # Debian drops old series from its newer releases; tests/e2e says which tests need this one.
        echo "state.sh: this Debian release has no $series kernel" >&2
        continue
    fi
    [ $status = 0 ] || exit 1
    ln -sfnT "$package" "$home/packages/$series.deb"
    stamp=$home/packages/.$build-$(basename "$package")
    id=$(cat "$stamp" 2>/dev/null || true)
    if [ -z "$id" ] || ! "$bulkhead" kernel list -q | grep -qxF "$id"; then
        full=()
        [ $series != 6.12 ] || full=(--full-modules)
        id=$("$bulkhead" kernel import -q "${full[@]}" "$package")
        echo "$id" >"$stamp"
    fi
    current+=("$id")
done
"$bulkhead" kernel list -q | while read -r id; do
    case " ${current[*]} " in
    *" $id "*) ;;
    *) "$bulkhead" kernel rm "$id" >/dev/null ;;
    esac
done
find "$home/packages" -name '.*' -type f -mtime +30 -delete
ln -sfnT "$("$tree/resources/kernels/package.sh" "$host_series")" "$home/packages/unpacked"

for image; do
    case $image in
    fio) "$rig/need" fio ;;
    debian) "$rig/need" mmdebstrap ;;
    esac
    case $image in
    busybox) mib=256 made_from=$(sha256sum /bin/busybox) ;;
    fio) mib=4096 made_from=$(dpkg-query -W fio busybox-static) ;;
    # Made anew each month, for what Debian has mended meanwhile.
    debian) mib=4096 made_from=$(cat /etc/os-release; date +%Y-%m) ;;
    *)
        echo "state.sh: no image $image" >&2
        exit 1
        ;;
    esac
    recipes=$tree/resources/images
    key=$(cat "$recipes"/{"$image",common,ext4}.sh - <<<"$made_from" | sha256sum | cut -c1-16)
    dir=$cache/images/$image-$key
    if [ ! -e "$dir/image.json" ]; then
        mkdir -p "$cache/images"
        tar=$cache/images/$image-$key.tar
        [ -e "$tar" ] || "$recipes/$image.sh" "$tar" >&2
        "$recipes/ext4.sh" "$image" "$mib" "$tar" "$dir"
    fi
    ln -sfnT "$dir" "$home/images/$image"
done
echo "$home"
