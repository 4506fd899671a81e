#!/bin/bash
# sources.sh PAYLOAD: images as people have them, made by the usual tools from this machine's Debian package source, each with
# a list of what its tree must be (`PAYLOAD tree DIR`). Made once and cached. Prints their directory.
#
#   mmdebstrap.tar.zst   a root tar with devices, pipes, hard links and set-uid programs
#   debootstrap.tar.gz   a root tar with attributes, long names and a sparse file (pax)
#   buildah.tar          an OCI archive: layers with whiteouts, and a configuration
#   docker.tar           an image over that one, as docker save has it
#   umoci/               an OCI layout: whiteouts, an opaque directory, hard links across layers
#
# Owners and devices need root.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../rig/common.sh"
payload=$(readlink -f "$1")
if [ "$(id -u)" != 0 ]; then
    exec sudo env XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}" "$0" "$payload"
fi
"$rig/need" mmdebstrap debootstrap buildah umoci attr zstd busybox-static
# The release that this machine runs, from where it has it.
codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
# shellcheck disable=SC2016 # apt fills it in
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' 'Origin: Debian' 'Architecture: amd64' "Codename: $codename" | head -1)
if [ -z "$mirror" ]; then
    echo "sources.sh: apt has no package lists of Debian $codename here; run: apt-get update" >&2
    exit 1
fi
key=$(cat "$0" "$tree/tests/payload/src/tree.rs" <(echo "$mirror $codename") | sha256sum | cut -c1-16)
dest=$cache/sources/$key
if [ -e "$dest" ]; then
    echo "$dest"
    exit
fi
echo "making images with mmdebstrap, debootstrap, buildah and umoci, once" >&2
mkdir -p "$cache/sources"
find "$cache/sources" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} +
work=$(mktemp -d "$cache/sources/.new.XXXXXX")
trap 'rm -rf "$work"' EXIT
out=$work/out
mkdir "$out"
# What the tools say is shown if one fails.
run() { "$@" >"$work/log" 2>&1 </dev/null || { cat "$work/log" >&2; echo "sources.sh: failed: $*" >&2; return 1; }; }

# As large as the systems are, they would take the tests minutes under emulation.
thin=()
for path in doc man locale zoneinfo i18n info; do thin+=(--dpkgopt="path-exclude=/usr/share/$path/*"); done
for path in gconv perl-base; do thin+=(--dpkgopt="path-exclude=/usr/lib/x86_64-linux-gnu/$path/*"); done
# shellcheck disable=SC2016 # the hook's shell fills it in
run mmdebstrap --variant=extract --include=base-files,dash,coreutils,libc6,perl-base,passwd "${thin[@]}" \
    --extract-hook='mkdir "$1/nodes" && mknod -m 640 "$1/nodes/vda" b 254 0 && mkfifo -m 600 "$1/nodes/pipe"' \
    "$codename" "$work/mmdebstrap.tar" "deb $mirror $codename main"
mkdir "$work/mmdebstrap"
tar -C "$work/mmdebstrap" --xattrs --xattrs-include='*' --same-owner -xpf "$work/mmdebstrap.tar"
"$payload" tree "$work/mmdebstrap" >"$out/mmdebstrap.tree"
zstd -q "$work/mmdebstrap.tar" -o "$out/mmdebstrap.tar.zst"

root=$work/debootstrap.root
run debootstrap --foreign --variant=minbase "$codename" "$root" "$mirror"
rm -rf "$root"/var/cache/apt/archives/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,zoneinfo,i18n,info} "$root"/usr/lib/x86_64-linux-gnu/{gconv,perl-base}
# Holes at the beginning, between and at the end.
for at in 1000001 5000000 8888888; do printf data | dd of="$root/var/log/lastlog" bs=1 seek=$at conv=notrunc status=none; done
truncate -s 12M "$root/var/log/lastlog" && truncate -s 1M "$root/var/log/wtmp"
deep=$root/srv/$(printf 'directory-with-a-long-name-%s/' 1 2 3 4 5 6)
mkdir -p "$deep" && echo deep >"$deep/$(printf 'f%.0s' {1..150})"
setfattr -n user.origin -v debootstrap "$root/etc/debian_version"
setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 "$root/bin/cat"
setfattr -n trusted.origin -v tree "$root/etc"
tar -C "$root" --format=posix --xattrs --xattrs-include='*' --sparse --numeric-owner -cf - . | gzip -6 >"$out/debootstrap.tar.gz"
mkdir "$work/debootstrap"
tar -C "$work/debootstrap" --xattrs --xattrs-include='*' --same-owner -xpf "$out/debootstrap.tar.gz"
"$payload" tree "$work/debootstrap" >"$out/debootstrap.tree"

store=$work/store
buildah() { command buildah --root "$store/root" --runroot "$store/run" --storage-driver vfs "$@"; }
# The first layer: two packages of Debian's.
(cd "$work" && run apt-get download busybox-static base-files)
from=$(buildah from scratch)
tree=$(buildah mount "$from")
for package in "$work"/*.deb; do dpkg -x "$package" "$tree"; done
ln -s busybox "$tree/bin/sh"
mkdir -p "$tree/etc" "$tree/srv/work" "$tree/gone/below" "$tree/becomes-a-file" "$tree/opaque/old"
printf 'root:x:0:0:root:/root:/bin/sh\napp:x:1234:1235::/srv:/bin/sh\n' >"$tree/etc/passwd"
echo one | tee "$tree/gone/below/file" "$tree/becomes-a-file/file" "$tree/becomes-a-directory" "$tree/changed" "$tree/opaque/old/file" >/dev/null
ln "$tree/changed" "$tree/linked"
run buildah umount "$from"
run buildah commit "$from" first
# The second: what an image's layers do to each other.
second=$(buildah from first)
tree=$(buildah mount "$second")
rm -r "$tree/gone" "$tree/becomes-a-file" "$tree/becomes-a-directory" "$tree/usr/share/doc"
echo two >"$tree/becomes-a-file"
mkdir "$tree/becomes-a-directory" && echo two >"$tree/becomes-a-directory/file"
ln "$tree/changed" "$tree/linked-again"
chown 1234:1235 "$tree/srv/work" && chmod 2750 "$tree/srv/work"
echo two >>"$tree/changed"
setfattr -n user.layer -v two "$tree/srv/work"
touch -d '2001-02-03 04:05:06.789' "$tree/srv/work"
run buildah umount "$second"
# shellcheck disable=SC2016 # the image's shell fills it in
run buildah config --entrypoint '["/bin/sh", "-c", "echo \"$A from $PWD as $(id -u):$(id -g), $0\""]' --cmd said --env A=hello --user app \
    --workingdir /srv/work --label org.example.origin=buildah "$second"
run buildah commit "$second" second
run buildah push second "oci-archive:$out/buildah.tar:example.org/test:1"
# The third: what was taken away comes back as something else, and a directory goes the way of its parts.
third=$(buildah from second)
tree=$(buildah mount "$third")
rm -r "$tree/srv/work" "$tree/linked-again" "$tree/becomes-a-directory"
ln -s ../etc "$tree/srv/work" && mknod "$tree/linked-again" c 1 7 && mkdir -m 1777 "$tree/gone"
ln "$tree/linked" "$tree/gone/linked" && chown -h 7:8 "$tree/srv/work"
run buildah umount "$third"
run buildah commit "$third" third
run buildah push third "docker-archive:$out/docker.tar:example.org/test:1"
# Its layers have whole seconds and no links to files of layers below, so a tree is what buildah itself makes of them; but
# for the root, which is in no layer.
for archive in oci-archive:buildah docker-archive:docker; do
    store=$work/${archive%:*} name=${archive#*:}
    from=$(buildah from "${archive%:*}:$out/$name.tar" 2>"$work/log") || { cat "$work/log" >&2; exit 1; }
    "$payload" tree "$(buildah mount "$from")" | sed 1d >"$out/$name.tree"
    run buildah umount "$from"
done

layout=$out/umoci
run umoci init --layout "$layout"
run umoci new --image "$layout:image"
run umoci unpack --image "$layout:image" "$work/bundle"
tree=$work/bundle/rootfs
for package in "$work"/*.deb; do dpkg -x "$package" "$tree"; done
mkdir -p "$tree/kept" "$tree/gone" "$tree/hidden/deep"
echo one | tee "$tree/kept/file" "$tree/gone/file" "$tree/hidden/deep/file" >/dev/null
ln "$tree/kept/file" "$tree/kept/link"
run umoci repack --refresh-bundle --image "$layout:image" "$work/bundle"
rm -r "$tree/gone" "$tree/usr/share/doc"
ln "$tree/kept/file" "$tree/kept/another"
mv "$tree/kept/link" "$tree/moved"
run umoci repack --refresh-bundle --image "$layout:image" "$work/bundle"
mkdir "$work/new" && echo two >"$work/new/only"
run umoci insert --image "$layout:image" --opaque "$work/new" /hidden
run umoci config --image "$layout:image" --config.cmd=/bin/sh --config.env=B=umoci
run umoci gc --layout "$layout"
run umoci unpack --image "$layout:image" "$work/unpacked"
"$payload" tree "$work/unpacked/rootfs" >"$out/umoci.tree"

chmod -R a+rX "$out"
mv -T "$out" "$dest"
echo "$dest"
