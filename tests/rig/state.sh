#!/bin/bash
# state.sh IMAGE...: a $BULKHEAD_HOME with the kernels and the named images, for demo, tests and benchmarks. Prints it.
# It needs what `make build` builds. What takes time to make is cached; what is not current is removed, so an upgrade
# leaves no older kernel.
#
#   kernels/         imported from Debian's packages by bulkhead; the newest with all of its modules
#   images/          imported by bulkhead from the root tars that the recipes in resources/images and tests/images make
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

# Root tars are made by recipes; bulkhead makes images of them, which takes guests. What they were made from names them.
shared=$tree/resources/images
builder=$(sed -n 's/^pub const BUILDER_VERSION.*= \(.*\);/\1/p' "$tree/guest/src/build.rs")
wanted=() missing=()
for image; do
    case $image in
    fio) "$rig/need" fio ;;
    debian) "$rig/need" mmdebstrap ;;
    nettools)
        "$rig/need" mmdebstrap
        command -v npm >/dev/null || "$rig/need" npm
        ;;
    esac
    parts=("$shared/$image.sh")
    # No larger than needed: an image is hashed before its first use after a start of the host, and each boot of the rig is
    # one; its 9p file system does not tell where a file has holes.
    case $image in
    busybox) size=256M made_from=$(sha256sum /bin/busybox) ;;
    fio) size=512M made_from=$(dpkg-query -W fio busybox-static) ;;
    # Made anew each month, for what Debian has mended meanwhile.
    debian) size=640M made_from=$(cat /etc/os-release; date +%Y-%m) parts+=("$shared/bootstrap.sh") ;;
    nettools)
        size=512M made_from=$(cat /etc/os-release; date +%Y-%m)
        parts=("$tree/tests/images/nettools".{sh,setup} "$shared/bootstrap.sh")
        ;;
    *)
        echo "state.sh: no image $image" >&2
        exit 1
        ;;
    esac
    key=$image-$(cat "${parts[@]}" "$shared/common.sh" - <<<"$made_from $size" | sha256sum | cut -c1-16)
    wanted+=("$image $key-$builder")
    if [ ! -e "$home/images/$(cat "$home/images/.$key-$builder" 2>/dev/null || true)/image.json" ]; then
        mkdir -p "$cache/tars"
        [ -e "$cache/tars/$key.tar" ] || "${parts[0]}" "$cache/tars/$key.tar" >&2
        missing+=("$image" "$size" "$cache/tars/$key.tar")
    fi
done
work=$(mktemp -d "$home/images/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT
if [ ${#missing[@]} -gt 0 ]; then
    "$rig/host" -m 4096 -t 900 -o "$work" -- env BULKHEAD_HOME="$home" BULKHEAD_DIST="${bulkhead%/bin/bulkhead}" \
        "$shared/import.sh" "${missing[@]}" >&2
fi
mkdir -p "$home/images/names"
for pair in "${wanted[@]}"; do
    read -r image stamp <<<"$pair"
    if [ -e "$work/$image" ]; then
        id=$(sed -n 's/^  "id": "\(.*\)",$/\1/p' "$work/$image/image.json")
        rm -rf "${home:?}/images/$id"
        mv -T "$work/$image" "$home/images/$id"
        echo "$id" >"$home/images/.$stamp"
    fi
    ln -sfnT "../$(cat "$home/images/.$stamp")" "$home/images/names/$image"
done
# What has lost its name is an older one.
"$bulkhead" image list -q | while read -r id; do
    find "$home/images/names" -lname "../$id" | grep -q . || "$bulkhead" image rm "$id" >/dev/null
done
echo "$home"
