#!/bin/bash
# package.sh [-f] SERIES [FLAVOUR]: fetches the newest Debian kernel package of a series, never installing it.
#
#   package.sh 6.12             the general-purpose kernel (the rig's own: it has 9p)
#   package.sh -f 6.12 cloud    the package's file of the cloud flavour (the guests'), for bulkhead kernel import
#
# Prints the package's file with -f, else a directory that holds it unpacked, PACKAGE/boot/vmlinuz-* and
# PACKAGE/lib/modules/*, with a modules.dep made. Both are cached by package name and version. Exit status 3: the package
# sources have no such kernel.
set -euo pipefail
want=unpacked
if [ "$1" = -f ]; then
    want='file'
    shift
fi
series=$1 flavour=${2:+-$2}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/bulkhead/packages
PATH=$PATH:/usr/sbin:/sbin

# Debian's names differ by release: 6.1.0-57-cloud-amd64, 6.12.117+deb12-cloud-amd64. "unsigned" is the one that holds
# the files; the rt flavour does not match.
newest() {
    apt-cache search --names-only "^linux-image-${series//./\\.}\\.[^-]+(-[0-9]+)?$flavour-amd64-unsigned\$" |
        cut -d' ' -f1 | sort -V | tail -1
}

name=$(newest)
if [ -z "$name" ]; then
    # The lists may be empty (containers) or only root may fetch them; a failure shows as "no such kernel" below.
    apt-get update -qq >&2 || true
    name=$(newest)
fi
if [ -z "$name" ]; then
    echo "package.sh: no linux-image-$series.*$flavour-amd64-unsigned in this machine's package sources" >&2
    exit 3
fi
version=$(apt-cache show --no-all-versions "$name" | sed -n 's/^Version: //p')
dir=$cache/${name}_$version
out=$dir
[ $want = unpacked ] || out=$dir.deb
if [ ! -e "$out" ]; then
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/new.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "fetching $name $version" >&2
    # apt warns that its own user cannot write here, which does no harm; its errors are shown.
    if ! (cd "$work" && apt-get download -qq "$name=$version" >log 2>&1); then
        cat "$work/log" >&2
        exit 1
    fi
    if [ $want = file ]; then
        mv "$work"/*.deb "$out"
    else
        dpkg -x "$work"/*.deb "$work/root"
        # Trixie ships its modules under usr.
        [ -d "$work/root/lib/modules" ] || ln -s usr/lib "$work/root/lib"
        for release in "$work"/root/lib/modules/*; do
            depmod -b "$work/root" "${release##*/}"
        done
        # Two at once: the first to rename wins, and both are alike.
        mv -T "$work/root" "$out" 2>/dev/null || [ -d "$out" ]
    fi
fi
echo "$out"
