#!/usr/bin/env python3
"""Prints how many tests ran and the slowest of them: those of a JUnit file that
`ctest --output-junit` wrote, and in place of a test binary the tests inside it,
if it wrote a file of its own to the folder that is given."""

import argparse
import pathlib
import xml.etree.ElementTree as ElementTree


def cases_of(path: pathlib.Path) -> list[tuple[float, str]]:
    cases = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        suite = case.get("classname") if path.parent.name == "gtest" else None
        name = f"{suite}.{case.get('name')}" if suite else case.get("name")
        cases.append((float(case.get("time")), name))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=pathlib.Path)
    parser.add_argument("--binaries", type=pathlib.Path, help="folder of gtest files")
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()

    times = []
    for seconds, name in cases_of(arguments.junit):
        inside = arguments.binaries and arguments.binaries / f"{name}.xml"
        times += cases_of(inside) if inside and inside.exists() else [(seconds, name)]
    times.sort(key=lambda entry: (-entry[0], entry[1]))
    print(f"{len(times)} tests in all; the slowest:")
    for seconds, name in times[: arguments.count]:
        print(f"  {seconds:7.2f} s  {name}")


if __name__ == "__main__":
    main()
