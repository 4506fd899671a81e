#!/bin/bash
# job.sh BULKHEAD OUT: the demo's job, as a user would start it.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
tar -c texts report.py look.sh | "$1" run -i -m 512M --timeout 2m debian sh -c '
    mkdir /job && cd /job && tar -x && python3 report.py texts out/report.md >&2 && cat out/report.md
    sh look.sh >&2' >"$2/report.md" 2>"$2/facts"
