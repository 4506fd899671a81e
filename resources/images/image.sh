# Sourced by the image recipes: what every image has, and how a directory becomes one.
# shellcheck shell=bash
PATH=$PATH:/usr/sbin:/sbin

# Files inside belong to root, or to users that only exist inside. Whoever is not root here builds as if they were.
if [ "$(id -u)" != 0 ] && [ -z "${FAKEROOTKEY:-}" ]; then
    exec fakeroot "$0" "$@"
fi

# skeleton ROOT: the directories and accounts of a minimal system, and busybox with all of its names.
skeleton() {
    local root=$1 name
    mkdir -p "$root"/{bin,dev,etc,home/user,proc,root,run,sbin,sys,tmp,usr/bin,usr/sbin,var/tmp}
    chmod 1777 "$root/tmp" "$root/var/tmp"
    chmod 700 "$root/root"
    chown 1000:1000 "$root/home/user"
    cat >"$root/etc/passwd" <<'END'
root:x:0:0:root:/root:/bin/sh
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/bin/false
END
    cat >"$root/etc/group" <<'END'
root:x:0:
user:x:1000:
nogroup:x:65534:
END
    echo '127.0.0.1 localhost' >"$root/etc/hosts"
    cp /bin/busybox "$root/bin/busybox"
    for name in $(/bin/busybox --list); do
        [ "$name" = busybox ] || ln -s busybox "$root/bin/$name"
    done
}

# finish NAME ROOT DEST MIB: writes DEST/root.img, an ext4 of ROOT's files, and DEST/image.json, both or neither.
finish() {
    local name=$1 root=$2 dest=$3 mib=$4 new
    mkdir -p "$(dirname "$dest")"
    new=$(mktemp -d "$(dirname "$dest")/.new.XXXXXX")
    truncate -s "${mib}M" "$new/root.img"
    # 4 KiB blocks are those of the disk's layers. Inode tables are left to the guest, so the file stays sparse.
    mke2fs -q -t ext4 -b 4096 -L "$name" -m 0 -J size=16 -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0 \
        -d "$root" "$new/root.img"
    cat >"$new/image.json" <<END
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
    chmod 755 "$new"
    rm -rf "$dest"
    mv -T "$new" "$dest"
}
