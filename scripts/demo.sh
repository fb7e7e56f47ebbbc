#!/usr/bin/env bash
# Sets up, builds and runs the example; the arguments go to it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

"$FSDP_ROOT/scripts/setup.sh"
if [[ ! -f "$FSDP_ROOT/examples/row_encoder/CMakeLists.txt" ]]; then
  echo "demo: there is no example yet"
  exit 0
fi
"$FSDP_ROOT/scripts/build.sh" ci row_encoder
exec "$FSDP_BUILD/bin/row_encoder" --data "$FSDP_BUILD/data/digits.csv" "$@"
