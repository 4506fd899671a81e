#!/bin/bash
# import.sh [NAME SIZE TAR]...: imports root tars with bulkhead, each to $RIG_OUT/NAME as it lies in a store of images.
# Runs where guests run: on this machine or in the rig, whose files are gone afterwards but for what is in $RIG_OUT.
# BULKHEAD_HOME has the kernels, BULKHEAD_DIST the program.
set -euo pipefail
home=$(mktemp -d "${SCRATCH:-$RIG_OUT}/home.XXXXXX")
trap 'rm -rf "$home"' EXIT
ln -s "$BULKHEAD_HOME/kernels" "$home/kernels"
while [ $# -gt 0 ]; do
    id=$(BULKHEAD_HOME=$home "$BULKHEAD_DIST/bin/bulkhead" image import -q --name "$1" --disk "$2" "$3")
    cp -r --sparse=always "$home/images/$id" "$RIG_OUT/$1"
    shift 3
done
