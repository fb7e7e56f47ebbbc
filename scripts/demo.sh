#!/usr/bin/env bash
# Sets up, builds and runs the row encoder: unsharded, on one rank and on two. The
# last line is `demo: ok` or `demo: FAILED: why`. The arguments go to the program.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

step="set-up"
trap 'echo "demo: FAILED: $step"' ERR
"$FSDP_ROOT/scripts/setup.sh"
step="build"
"$FSDP_ROOT/scripts/build.sh" ci row_encoder fsdp_tool
trap - ERR

exec "$FSDP_ROOT/scripts/run_demo.sh" "$FSDP_BUILD" "$FSDP_BUILD/demo" "$@"
