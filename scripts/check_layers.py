#!/usr/bin/env python3
"""Checks the include rules between the layers of src/ and the public headers.

Prints every violation as FILE:LINE and exits 1 when there is any.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")

# Lower layers first: a file includes its own layer and lower ones only.
LAYERS = [
    "layout",
    "schedule",
    "plan",
    "profile",
    "launch",
    "device",
    "comm",
    "runtime",
    "checkpoint",
    "train",
    "api",
]
TORCH_FREE = {"layout", "schedule", "plan", "profile", "launch", "comm"}
# The back end that speaks to c10d is the one part of comm that may see torch.
C10D_FILE = re.compile(r"^src/comm/(c10d|gloo|nccl)_[^/]*$")
TORCH_FREE_PUBLIC = {"include/fsdp/communicator.h", "include/fsdp/version.h"}


def breaks_rule(path: str, include: str) -> str:
    """Returns what is wrong with the include, or an empty string."""
    is_public = path.startswith("include/")
    layer = path.split("/")[1] if path.startswith("src/") else ""
    is_torch = bool(TORCH.match(include))

    if is_torch and layer in TORCH_FREE and not C10D_FILE.match(path):
        return f"src/{layer} must not include torch"
    if is_torch and path in TORCH_FREE_PUBLIC:
        return "this header must not include torch"
    if is_public and include.startswith("torch/csrc/"):
        return "a public header must not include torch/csrc"
    if layer != "runtime" and (
        include.startswith("torch/csrc/autograd/")
        or include == "torch/library.h"
    ):
        return "only src/runtime may include this"
    if include.startswith("torch/csrc/distributed/") and layer != "comm":
        return "only src/comm may include c10d"
    target = include.split("/")[0]
    if layer in LAYERS and "/" in include and target in LAYERS:
        if LAYERS.index(target) > LAYERS.index(layer):
            return f"src/{layer} must not include the higher layer {target}"
    return ""


def sources():
    for folder in ("include", "src"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                yield path


def main() -> int:
    violations = []
    count = 0
    for path in sources():
        count += 1
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        for match in INCLUDE.finditer(text):
            problem = breaks_rule(name, match.group(1))
            if problem:
                line = text.count("\n", 0, match.start(1)) + 1
                violations.append(
                    f"{name}:{line}: includes {match.group(1)}: {problem}"
                )
    for violation in violations:
        print(violation)
    print(f"check_layers: {count} files, {len(violations)} violations")
    return 1 if violations or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
