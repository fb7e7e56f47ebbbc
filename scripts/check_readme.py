#!/usr/bin/env python3
"""Checks that the program in README.md is examples/minimal/main.cpp, which is
built and run by the tests."""
import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parent.parent
readme = (root / "README.md").read_text()
program = (root / "examples/minimal/main.cpp").read_text()
shown = re.search(r"```cpp\n(.*?)```", readme, re.S)
if shown is None or shown.group(1) != program:
    sys.exit("README.md: its first program differs from examples/minimal/main.cpp")
