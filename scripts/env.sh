# Sourced by the other scripts: where things live, and which torch is used.

: "${TORCH_VERSION:=2.13.0}"
FSDP_DEFAULT_TORCH_VERSION=2.13.0
FSDP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
FSDP_CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/libfsdp"

# A libtorch that is already there: Torch_DIR, or a folder of CMAKE_PREFIX_PATH.
fsdp_external_torch() {
  local prefix
  local -a prefixes
  if [[ -n "${Torch_DIR:-}" ]]; then
    return 0
  fi
  IFS=':;' read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    if [[ -f "$prefix/share/cmake/Torch/TorchConfig.cmake" ]]; then
      return 0
    fi
  done
  return 1
}

if fsdp_external_torch; then
  FSDP_VENV="$FSDP_CACHE/venv-tools"
  FSDP_REQUIREMENTS=(numpy)
  FSDP_BUILD="$FSDP_ROOT/build/torch-external"
else
  FSDP_VENV="$FSDP_CACHE/venv-torch-$TORCH_VERSION"
  FSDP_REQUIREMENTS=("torch==$TORCH_VERSION" numpy)
  if [[ "$TORCH_VERSION" == "$FSDP_DEFAULT_TORCH_VERSION" ]]; then
    FSDP_BUILD="$FSDP_ROOT/build"
  else
    FSDP_BUILD="$FSDP_ROOT/build/torch-$TORCH_VERSION"
  fi
fi
