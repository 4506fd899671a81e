#!/bin/bash
# import.sh NAME TAR DIR: bulkhead's import of a root tar, into DIR/ID and DIR/names/NAME, as in a state directory's images/.
# Runs where guests run: on this machine, or in the rig, whose files are gone afterwards but for what is copied out here.
# BULKHEAD_HOME has the kernels, BULKHEAD_DIST the program.
set -euo pipefail
name=$1 tar=$2 to=$3
home=$(mktemp -d "${SCRATCH:-${TMPDIR:-/tmp}}/import.XXXXXX")
trap 'rm -rf "$home"' EXIT
ln -s "$BULKHEAD_HOME/kernels" "$home/kernels"
id=$(BULKHEAD_HOME=$home "$BULKHEAD_DIST/bin/bulkhead" image import -q --name "$name" --disk 4G "$tar")
mkdir -p "$to/names"
cp -r --sparse=always "$home/images/$id" "$to/"
ln -sfn "../$id" "$to/names/$name"
