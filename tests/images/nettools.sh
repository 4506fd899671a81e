#!/bin/bash
# nettools.sh TAR: Debian with the clients that programs use (curl, wget, dig, openssl, ssh, nc, git, pip, npm), and with what
# serves them in the tests (python3, sshd, git). A certificate authority of its own is trusted in it, as a company's would be.
# Debian's npm is hundreds of packages, so npm is its makers' own archive.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
. "$here/../../resources/images/bootstrap.sh"
version=10.9.8
sha512=7d8c1be8e0d298792aac9410682c58dccda53dffe6a600bb8a4d074b3cc8c06e421ad69b469e1b36a8a46adbc2a13e366f920d412aae7551f447bc95982f6156

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "npm@$version" >&2)
sha512sum --quiet --check - <<<"$sha512  $work/npm-$version.tgz"
chmod 755 "$work" && chmod 644 "$work/npm-$version.tgz"
install -m 755 "$here/nettools.setup" "$work/setup"

packages=ca-certificates,curl,wget,bind9-dnsutils,openssl,openssh-client,openssh-server,netcat-openbsd,git,python3,python3-pip,nodejs
# Perl is for what nobody does here once the system is made.
# shellcheck disable=SC2016 # the hooks' shell fills them in
bootstrap "$1" essential "$packages,iproute2,iputils-ping,iputils-arping,busybox-static" \
    --dpkgopt='path-exclude=/usr/lib/x86_64-linux-gnu/gconv/*' --dpkgopt='path-exclude=/usr/share/zoneinfo/*' \
    --customize-hook="copy-in $work/npm-$version.tgz $work/setup /tmp" \
    --customize-hook='chroot "$1" /tmp/setup' \
    --customize-hook='cd "$1" && rm -rf etc/hostname etc/resolv.conf tmp/* var/lib/apt/lists/* var/cache/apt/* usr/share/perl usr/lib/x86_64-linux-gnu/perl'
