#!/bin/bash
# debian.sh TAR: a small Debian system for agents, from the package sources of this machine: apt and what is essential, and
# python3, git, curl, ca-certificates, ripgrep, nodejs, kmod. Needs mmdebstrap, and as another user than root also
# user namespaces (uidmap).
set -euo pipefail

# Suites of Debian itself: what else the machine has, it has for itself.
# shellcheck disable=SC2016 # apt fills these in
sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
    'Identifier: Packages' 'Origin: Debian' 'Architecture: amd64')
if [ -z "$sources" ]; then
    echo "debian.sh: apt has no package lists of Debian here; run: apt-get update" >&2
    exit 1
fi
# The release is the one that the machine runs; its updates come with it.
suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)

# Documents and translations are of no use to a program; licences stay.
thin=()
for path in /usr/share/doc/'*' /usr/share/man/'*' /usr/share/info/'*' /usr/share/locale/'*' /usr/share/lintian/'*'; do
    thin+=(--dpkgopt="path-exclude=$path")
done
thin+=(--dpkgopt='path-include=/usr/share/doc/*/copyright')

# shellcheck disable=SC2016 # the hooks' shell fills them in
hooks=(
    --customize-hook='useradd -R "$1" -m -u 1000 -s /bin/bash user'
    --customize-hook='rm -f "$1/etc/hostname" "$1/etc/resolv.conf"'
)
echo "debian.sh: making a Debian $suite system; this takes a minute or two" >&2
mmdebstrap --quiet --variant=minbase "${thin[@]}" \
    --include=python3,git,curl,ca-certificates,ripgrep,nodejs,kmod "${hooks[@]}" \
    "$suite" "$1.new.tar" - <<<"$sources"
mv "$1.new.tar" "$1"
