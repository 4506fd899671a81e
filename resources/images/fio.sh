#!/bin/bash
# fio.sh DEST: the busybox image with Debian's fio and the libraries that it loads, and room to measure in.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/image.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skeleton "$work"
for file in "$(command -v fio)" $(ldd "$(command -v fio)" | grep -o '/[^ ]*'); do
    mkdir -p "$work$(dirname "$file")"
    cp -L "$file" "$work$file"
done
finish fio "$work" "$1" 4096
