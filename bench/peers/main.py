#!/usr/bin/env python3
"""One rank of one side of the benchmarks, in Python. Started by bench/run.py.

Measures: "step", the seconds of training steps; "peak", the most bytes that
tensors hold during steps (with --count-bytes)."""

import argparse
import ctypes
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "interop"))

import torch
import torch.distributed as dist

import sides
import token_pipe


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=sides.SIDES, required=True)
    for name in ("layers", "width", "heads", "vocabulary", "batch", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--store", help="a file by which the ranks meet")
    parser.add_argument("--count-bytes", help="the library that counts")
    return parser.parse_args()


def load_counter(path):
    counter = ctypes.CDLL(path)
    for name in ("bench_live_bytes", "bench_peak_bytes"):
        getattr(counter, name).restype = ctypes.c_int64
    return counter


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)
    counter = None
    before = 0
    if arguments.count_bytes:
        counter = load_counter(arguments.count_bytes)
        before = counter.bench_live_bytes()
    step = sides.SIDES[arguments.side](arguments)

    def answer(measure, count):
        if measure == "step":
            return token_pipe.seconds_of(count, step)
        if measure == "peak" and counter is not None:
            counter.bench_reset_peak()
            token_pipe.seconds_of(count, step)
            return {"values": {"peak_bytes": counter.bench_peak_bytes() - before}}
        raise ValueError(f"unknown measure {measure!r}")

    token_pipe.serve(answer)
    # The ranks part together: stdin has ended for all of them.
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # what the interpreter would tear down is of no interest


if __name__ == "__main__":
    main()
