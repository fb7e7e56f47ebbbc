#!/usr/bin/env bash
# Runs the row encoder on two ranks, and compares it with unsharded training. The
# last line is `demo: ok` or `demo: FAILED: why`.
# usage: scripts/run_demo.sh BUILD OUTPUT [ARGUMENT...]
#   BUILD     the folder with bin/ and data/
#   OUTPUT    the folder for summary.json and losses.csv
#   ARGUMENT  goes to row_encoder
set -euo pipefail
build="$1"
output="$2"
shift 2

# What summary.json says is wrong: of each fault the first line.
faults() {
  python3 - "$output/summary.json" <<'END'
import json, sys

with open(sys.argv[1]) as file:
    faults = json.load(file)["faults"]
print("; ".join(fault.splitlines()[0] for fault in faults))
END
}

rm -f "$output/summary.json"
status=0
LIBFSDP_LOG="${LIBFSDP_LOG:-info}" \
  "$build/bin/fsdp" run -n 2 --no-prefix -- "$build/bin/row_encoder" \
  --data "$build/data/digits.csv" --compare --min-accuracy 0.94 \
  --summary "$output/summary.json" --log "$output/losses.csv" "$@" || status=$?
if ((status == 0)); then
  echo "demo: ok"
  exit
fi
why="$(faults 2>/dev/null || true)" # there are none where rank 0 was killed
echo "demo: FAILED: ${why:-row_encoder ended with status $status}"
exit 1
