#!/usr/bin/env bash
# Runs clang-tidy on the sources without torch, which are quick, and on those
# with torch that differ from BASE (default: HEAD); `--all` takes all of them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

"$FSDP_ROOT/scripts/setup.sh" clang-tidy
cd "$FSDP_ROOT"
folder="$FSDP_BUILD/tidy"
cmake --preset tidy -B "$folder" "-DFSDP_TORCH_VENV=$FSDP_VENV" >/dev/null

sources() {
  if [[ "${1:-}" == --all ]]; then
    git ls-files --cached --others --exclude-standard -- '*.cpp'
  else
    git ls-files --cached --others --exclude-standard -- \
      src/{layout,launch,comm}/'*.cpp' tests/{layout,launch,comm}/'*.cpp' tools/'*.cpp'
    git diff --name-only --diff-filter=d "${BASE:-HEAD}" -- '*.cpp' || true
    git ls-files --others --exclude-standard -- '*.cpp'
  fi | sort -u
}

# Only what the build compiles has a compile command.
compiled="$(python3 -c 'import json, os, sys
for entry in json.load(open(sys.argv[1])):
    print(os.path.relpath(entry["file"]))' "$folder/compile_commands.json" | sort -u)"
comm -12 <(sources "$@") <(echo "$compiled") |
  xargs --no-run-if-empty --max-args=1 --max-procs=2 \
    clang-tidy --quiet -p "$folder"
