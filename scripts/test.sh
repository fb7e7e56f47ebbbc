#!/usr/bin/env bash
# Sets up, builds and runs the tests; `--long` adds those that take long. The
# other arguments go to ctest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

select=(--label-exclude '^long$')
if [[ "${1:-}" == --long ]]; then
  select=()
  shift
fi

SECONDS=0
"$FSDP_ROOT/scripts/setup.sh"
setup_s=$SECONDS
"$FSDP_ROOT/scripts/build.sh" ci
build_s=$((SECONDS - setup_s))

junit="$FSDP_BUILD/Testing/junit.xml"
binaries="$FSDP_BUILD/Testing/gtest"
rm -rf "$junit" "$binaries"
status=0
ctest --test-dir "$FSDP_BUILD" --output-on-failure --no-tests=error \
  --parallel 2 --output-junit "$junit" "${select[@]}" "$@" || status=$?
tests_s=$((SECONDS - setup_s - build_s))

if [[ -f "$junit" ]]; then
  "$FSDP_VENV/bin/python" "$FSDP_ROOT/scripts/slowest_tests.py" "$junit" \
    --binaries "$binaries"
fi
echo "times: set-up $setup_s s, build $build_s s, tests $tests_s s"
exit "$status"
