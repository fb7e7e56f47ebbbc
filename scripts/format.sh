#!/usr/bin/env bash
# Formats the C++ files in place; `--check` only reports what would change.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

"$FSDP_ROOT/scripts/setup.sh" clang-format
mode=(-i)
if [[ "${1:-}" == --check ]]; then
  mode=(--dry-run --Werror)
fi
cd "$FSDP_ROOT"
git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' |
  xargs --no-run-if-empty clang-format --style=file "${mode[@]}"
