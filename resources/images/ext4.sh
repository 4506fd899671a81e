#!/bin/bash
# ext4.sh NAME MIB TAR DEST: makes DEST/root.img, an ext4 of the archive's files, and DEST/image.json, both or neither.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
if [ "$(id -u)" != 0 ] && [ -z "${FAKEROOTKEY:-}" ]; then
    exec fakeroot "$0" "$@"
fi
name=$1 mib=$2 tar=$3 dest=$4
mkdir -p "$(dirname "$dest")"
new=$(mktemp -d "$(dirname "$dest")/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT
mkdir "$new/root" "$new/out"
tar -C "$new/root" --numeric-owner -xpf "$tar"
truncate -s "${mib}M" "$new/out/root.img"
# 4 KiB blocks are those of the disk's layers. Inode tables are left to the guest, so the file stays sparse.
mke2fs -q -t ext4 -b 4096 -L "$name" -m 0 -J size=16 -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0 \
    -d "$new/root" "$new/out/root.img"
cat >"$new/out/image.json" <<END
{
  "name": "$name",
  "config": {
    "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    "cmd": ["/bin/sh"],
    "workdir": "/",
    "user": "0"
  }
}
END
rm -rf "$dest"
mv -T "$new/out" "$dest"
