#!/usr/bin/env python3
"""Prints the slowest tests of a JUnit file that `ctest --output-junit` wrote."""

import argparse
import xml.etree.ElementTree as ElementTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit")
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()

    cases = ElementTree.parse(arguments.junit).getroot().iter("testcase")
    times = [(float(case.get("time")), case.get("name")) for case in cases]
    times.sort(key=lambda entry: (-entry[0], entry[1]))
    print("slowest tests:")
    for seconds, name in times[: arguments.count]:
        print(f"  {seconds:7.2f} s  {name}")


if __name__ == "__main__":
    main()
