#!/bin/bash
# busybox.sh TAR: a system of one static program, Debian's busybox: the image of the tests.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skeleton "$work"
pack "$work" "$1"
