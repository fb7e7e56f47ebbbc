#!/usr/bin/env bash
# Sets up, builds and runs the example: unsharded, on one rank and on two. The
# last line is `demo: ok` or `demo: FAILED: why`. The arguments go to the example.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

step="set-up"
trap 'echo "demo: FAILED: $step"' ERR
"$FSDP_ROOT/scripts/setup.sh"
step="build"
"$FSDP_ROOT/scripts/build.sh" ci row_encoder fsdp_tool
trap - ERR

status=0
"$FSDP_BUILD/bin/row_encoder" --data "$FSDP_BUILD/data/digits.csv" \
  --compare --min-accuracy 0.94 \
  --summary "$FSDP_BUILD/demo/summary.json" \
  --log "$FSDP_BUILD/demo/losses.csv" "$@" || status=$?
if ((status > 1)); then # usage, or a signal: the example gave no verdict
  echo "demo: FAILED: row_encoder ended with status $status"
  exit 1
fi
exit "$status"
