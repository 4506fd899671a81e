#!/bin/bash
# fio.sh TAR: the busybox system with Debian's fio and the libraries that it loads: the image of the benchmarks.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/common.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skeleton "$work"
for file in "$(command -v fio)" $(ldd "$(command -v fio)" | grep -o '/[^ ]*'); do
    mkdir -p "$work$(dirname "$file")"
    cp -L "$file" "$work$file"
done
pack "$work" "$1"
