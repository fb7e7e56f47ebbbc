#!/usr/bin/env bash
# Configures with a preset (default: ci) and builds the targets that are named.
# usage: scripts/build.sh [PRESET [TARGET...]]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

preset="${1:-ci}"
shift || true
folder="$FSDP_BUILD"
if [[ "$preset" != ci ]]; then
  folder="$FSDP_BUILD/$preset"
fi

definitions=()
if [[ "$preset" != asan && "$preset" != tsan ]]; then
  if fsdp_external_torch; then
    definitions=(-DFSDP_TORCH_VENV= -DFSDP_TORCH_IMPORT=AUTO)
  else
    definitions=(
      "-DFSDP_TORCH_VENV=$FSDP_VENV" "-DFSDP_TORCH_VERSION=$TORCH_VERSION")
  fi
fi

# One compile job may take 2 GB.
jobs="$(nproc)"
memory_gb="$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)"
if ((jobs > memory_gb / 2)); then
  jobs="$((memory_gb / 2 > 0 ? memory_gb / 2 : 1))"
fi

cd "$FSDP_ROOT"
cmake --preset "$preset" -B "$folder" "${definitions[@]}" --log-level=NOTICE >/dev/null
if (($# > 0)); then
  cmake --build "$folder" --parallel "$jobs" --target "$@"
else
  cmake --build "$folder" --parallel "$jobs"
fi
