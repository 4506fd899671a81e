#!/bin/bash
# cpio.sh DIR: DIR as a newc archive on standard output, the same bytes for the same content: sorted, root's, dated 1970.
set -euo pipefail
cd "$1"
find . -mindepth 1 -exec touch -h -d @0 {} +
find . -mindepth 1 | sed 's|^\./||' | LC_ALL=C sort | cpio --quiet --reproducible -o -H newc -R 0:0
