#!/bin/bash
# demo.sh: a real job in a microVM, and what kept it in. The Makefile's "demo" calls it with BULKHEAD_HOME and BULKHEAD_DIST.
#
# A directory of text files goes in, a Python script that is not trusted writes a report, the report comes out.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
tree=$(readlink -f "$here/../..")
: "${BULKHEAD_HOME:?}" "${BULKHEAD_DIST:?}"
bulkhead=$BULKHEAD_DIST/bin/bulkhead
started=$SECONDS

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
echo "The job: count the words of some text files, with a script that nobody has looked at."
echo
# shellcheck disable=SC2016 # those are the script's own words
sed -n '/^"$1" run/,$ { s/^"$1"/$ bulkhead/; s/"$2"/OUT/; p }' "$here/job.sh"
echo
# Where guests run: here, or in the emulated host, which keeps only what is left in its $RIG_OUT.
status=0
# shellcheck disable=SC2016 # RIG_OUT is set where it runs
"$tree/tests/rig/host" -t 300 -o "$out" -- env BULKHEAD_HOME="$BULKHEAD_HOME" \
    bash -c '"$1" "$2" "$RIG_OUT"' demo "$here/job.sh" "$bulkhead" || status=$?
if [ $status != 0 ]; then
    echo "demo: the job ended with status $status; what bulkhead said is above" >&2
    exit $status
fi
report=$out/report.md facts=$out/facts
# What comes from inside is not printed as it is: a terminal obeys much of what it is shown.
inside() { sed -n "s/^$1\t//p" "$facts" | tr -cd '[:print:]'; }

cat <<END

What came out, report.md:

$(tr -cd '[:print:]\n' <"$report" | sed 's/^/    /')

What the job saw, and what it did not:

    kernel      $(inside kernel), its own; this machine runs $(uname -r)
    machine     $(inside cpus) CPU, $(inside memory), host name $(inside host)
    disk        $(inside disk), a copy-on-write layer over the image; removed when the run ended
    files       the image's, and copies of those three inputs; of this machine's files none: there is no shared
                directory, and the job's writes ended in that layer
    processes   $(inside processes), all of its own; it was $(inside user) there, which is nobody here
    network     interfaces: $(inside interfaces)- what leaves goes through a filter, which was told to allow nothing:
                connecting to an address: $(inside address)
                looking up a name: $(inside name)
    came out    copies of what it left in out/, its output and its exit status; nothing in there decides where a
                file is written here

What held it: hardware virtualisation, entered through a VMM that opens no file and makes no socket, written for this one
purpose (docs/architecture.md). After the run nothing of it is left: no process, no mount, no interface, no disk. What is
not there yet is in README.md.

$((SECONDS - started)) seconds. More: docs/cli.md
END
