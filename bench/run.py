#!/usr/bin/env python3
"""Measures libfsdp and its peers side by side: docs/benchmarks.md tells how and
what each row means. Writes OUTPUT/results.json and OUTPUT/steps.svg."""

import argparse
import os
import pathlib
import signal
import sys
import time

from conductor import collectives, engine, memory, picture, rows
from conductor.bench import Bench
from conductor.processes import SideFailed
from conductor.progress import Progress

GROUPS = {
    "engine": engine.PARTS,
    "collectives": collectives.PARTS,
    "memory": memory.PARTS,
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True, help="has bin/ and lib/")
    parser.add_argument("--output", required=True, help="folder of the results")
    parser.add_argument("--group", choices=GROUPS, help="default: all")
    parser.add_argument("--part", help="of the group, such as tiny_units")
    parser.add_argument("--quick", action="store_true", help="rougher")
    arguments = parser.parse_args()
    if arguments.part is not None:
        if arguments.group is None:
            parser.error("--part needs --group")
        if arguments.part not in GROUPS[arguments.group]:
            names = ", ".join(GROUPS[arguments.group])
            parser.error(f"--part of {arguments.group} is one of: {names}")
    return arguments


def run_group(bench, group, part, path):
    """Runs the parts of a group; returns the messages of those that failed. The
    file is up to date after each part."""
    found, failures = [], []
    parts = {part: GROUPS[group][part]} if part else GROUPS[group]
    for name, run in parts.items():
        begin = time.monotonic()
        try:
            new = run(bench)
        except SideFailed as error:
            failures.append(f"{group}, {name}: {error}")
            bench.progress.say(f"FAILED: {failures[-1]}")
            continue
        if bench.is_quick:
            new = [dict(row, quick=True) for row in new]
        found += new
        rows.write(path, rows.merge(rows.read(path), new, group, False))
        took = time.monotonic() - begin
        bench.progress.say(f"{group}, {name}: {took:.0f} s")
    if part is None and not failures:
        rows.write(path, rows.merge(rows.read(path), found, group, True))
    return found, failures


def main():
    arguments = parse_arguments()
    # As SystemExit, so that all sides are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = Progress()
    bench = Bench(arguments.build, arguments.quick, progress)
    bench.say_what_is_left_out()
    output = pathlib.Path(arguments.output)
    path = output / "results.json"
    found, failures = [], []
    for group in [arguments.group] if arguments.group else GROUPS:
        new, failed = run_group(bench, group, arguments.part, path)
        found += new
        failures += failed
    picture.write(output / "steps.svg", rows.read(path))
    progress.say("\n" + rows.table(found))
    progress.say(f"\nwritten: {os.path.relpath(path)}")
    for failure in failures:
        progress.say(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
