#!/bin/bash
# job.sh BULKHEAD OUT: the demo's job, as a user would start it.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
"$1" run -m 512M --timeout 2m -w /job \
    --input texts --input report.py --input look.sh --artifact 'out/*' --artifact-dir "$2" \
    debian sh -c 'python3 report.py texts out/report.md && sh look.sh >out/facts'
