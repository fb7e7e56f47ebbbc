#!/usr/bin/env bash
# Installs what the build and the tests need and is not there yet: Debian
# packages (those of the build, and the ones named as arguments), and a Python
# environment with torch. Silent when nothing is missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

packages=(
  g++ cmake ninja-build ccache python3 python3-venv
  libgtest-dev libcli11-dev nlohmann-json3-dev zlib1g-dev
  "$@"
)

say() { echo "setup: $*"; }

missing_packages() {
  local name
  local installed
  installed="$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' \
    "${packages[@]}" 2>/dev/null || true)"
  for name in "${packages[@]}"; do
    if ! grep -qxF "$name installed" <<<"$installed"; then
      echo "$name"
    fi
  done
}

install_packages() {
  local -a missing
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system; install by hand: ${packages[*]}"
    return
  fi
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]} == 0)); then
    return
  fi
  say "installing Debian packages: ${missing[*]}"
  local -a as_root=()
  if ((EUID != 0)); then
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 9>&-
}

# The stamp is written last, so an interrupted installation starts afresh.
install_venv() {
  local stamp="$FSDP_VENV/.complete"
  local wanted="${FSDP_REQUIREMENTS[*]}"
  if [[ -x "$FSDP_VENV/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then
    return
  fi
  say "installing from PyPI into $FSDP_VENV: $wanted"
  /usr/bin/python3 -m venv --clear "$FSDP_VENV"
  "$FSDP_VENV/bin/python" -m pip install --quiet \
    --disable-pip-version-check --no-cache-dir "${FSDP_REQUIREMENTS[@]}"
  echo "$wanted" >"$stamp"
}

# The link serves people and the presets; it stays with the default version.
link_venv() {
  local link="$FSDP_ROOT/.venv"
  if fsdp_external_torch || [[ "$(readlink "$link")" == "$FSDP_VENV" ]]; then
    return
  fi
  if [[ "$TORCH_VERSION" == "$FSDP_DEFAULT_TORCH_VERSION" || ! -e "$link" ]]; then
    ln -sfn "$FSDP_VENV" "$link"
  fi
}

mkdir -p "$FSDP_CACHE"
exec 9>"$FSDP_CACHE/lock"
flock 9
install_packages
install_venv
link_venv
"$FSDP_VENV/bin/python" "$FSDP_ROOT/scripts/fetch_digits.py" \
  --cache "$FSDP_CACHE/data" --output "$FSDP_BUILD/data/digits.csv"
