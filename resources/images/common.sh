# Sourced by the recipes that put a root file system together by hand: what all of them have.
# A recipe is called with one argument, the tar archive to write.
# shellcheck shell=bash

# Files inside belong to root, or to users that only exist inside. Whoever is not root here builds as if they were.
if [ "$(id -u)" != 0 ] && [ -z "${FAKEROOTKEY:-}" ]; then
    exec fakeroot "$0" "$@"
fi

# skeleton ROOT: the directories and accounts of a minimal system, and busybox with all of its names.
skeleton() {
    local root=$1 name
    mkdir -p "$root"/{bin,dev,etc,home/user,proc,root,run,sbin,sys,tmp,usr/bin,usr/sbin,var/tmp}
    chmod 755 "$root"
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

# pack ROOT TAR: the same bytes for the same content.
pack() {
    tar -C "$1" --sort=name --mtime=@0 --numeric-owner --format=gnu -cf "$2.new" .
    mv "$2.new" "$2"
}
