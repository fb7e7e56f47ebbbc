#!/usr/bin/env python3
"""Puts the digits data set where the tests and the demo read it.

The file is a member of scikit-learn's wheel on PyPI: 1,797 rows, each 64 pixel
values and a label. Nothing is done when the output is already there.
"""

import argparse
import gzip
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

REQUIREMENT = "scikit-learn==1.7.2"
MEMBER = "sklearn/datasets/data/digits.csv.gz"
ROWS = 1797
COLUMNS = 65


def check(text: bytes, where: pathlib.Path) -> None:
    lines = text.splitlines()
    columns = {line.count(b",") + 1 for line in lines}
    if len(lines) != ROWS or columns != {COLUMNS}:
        raise SystemExit(
            f"fetch_digits: {where} has {len(lines)} rows of "
            f"{sorted(columns)} columns: expected {ROWS} rows of {COLUMNS}. "
            "Delete it and run again."
        )


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)


def download(target: pathlib.Path) -> None:
    print(f"setup: fetching digits.csv.gz from {REQUIREMENT}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            + ["--disable-pip-version-check", "--only-binary=:all:"]
            + ["--dest", folder, REQUIREMENT],
            check=True,
        )
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(MEMBER)
    check(gzip.decompress(content), target)
    write_atomically(target, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    if arguments.output.exists():
        check(arguments.output.read_bytes(), arguments.output)
        return
    compressed = arguments.cache / "digits.csv.gz"
    if not compressed.exists():
        download(compressed)
    text = gzip.decompress(compressed.read_bytes())
    check(text, compressed)
    write_atomically(arguments.output, text)


if __name__ == "__main__":
    main()
