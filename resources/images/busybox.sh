#!/bin/bash
# busybox.sh DEST: makes DEST/root.img and DEST/image.json, a system of one static program: the image of the tests.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/image.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skeleton "$work"
finish busybox "$work" "$1" 256
