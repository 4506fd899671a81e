#!/bin/bash
# debian.sh TAR: a small Debian system for agents: apt and what is essential, and python3, git, curl, ca-certificates, ripgrep,
# nodejs, kmod.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/bootstrap.sh"

# shellcheck disable=SC2016 # the hooks' shell fills them in
bootstrap "$1" minbase python3,git,curl,ca-certificates,ripgrep,nodejs,kmod \
    --customize-hook='useradd -R "$1" -m -u 1000 -s /bin/bash user' \
    --customize-hook='rm -f "$1/etc/hostname" "$1/etc/resolv.conf"'
