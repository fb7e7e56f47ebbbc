#!/usr/bin/env bash
# Builds the benchmarks and runs them side by side with the peers; the results are
# in build/bench. docs/benchmarks.md says what the rows mean.
#   GROUP=engine|collectives|memory  only these rows (default: all)
#   PART=NAME                        only one part of the group
#   QUICK=1                          fewer rounds: at most five minutes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

arguments=()
if [[ -n "${GROUP:-}" ]]; then
  arguments+=("--group=$GROUP")
fi
if [[ -n "${PART:-}" ]]; then
  arguments+=("--part=$PART")
fi
if [[ "${QUICK:-0}" != 0 ]]; then
  arguments+=(--quick)
fi

"$FSDP_ROOT/scripts/setup.sh"
"$FSDP_ROOT/scripts/build.sh" ci bench_programs
exec "$FSDP_VENV/bin/python" -B "$FSDP_ROOT/bench/run.py" \
  --build="$FSDP_BUILD" --output="$FSDP_BUILD/bench" "${arguments[@]}" "$@"
