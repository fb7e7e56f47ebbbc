#!/usr/bin/env python3
"""Trains one GPT with gpt_losses, on each back end, and with Python's FSDP2, live,
and exits 1 unless the losses of all steps agree; 77 where there is no Python
with torch to compare with. The other arguments go to both programs."""

import argparse
import json
import math
import os
import pathlib
import sys

import processes

TOLERANCE = 1e-5  # relative
LIMIT_S = 60
BACKENDS = ("shm", "gloo")


def run(name: str, command: list[str]) -> dict:
    print(f"{name}: {' '.join(command)}", flush=True)
    # The limit of the programs is LIMIT_S: their own messages come first.
    output = processes.run_together({name: command}, LIMIT_S + 5)[name]
    return json.loads(output)


def run_ours(backend: str, arguments, rest: list[str]) -> dict:
    launch = [arguments.launcher, "run", "--no-prefix", f"-n{arguments.ranks}"]
    launch += [f"--backend={backend}", f"--timeout={LIMIT_S}", "--"]
    return run(backend, [*launch, arguments.program, *rest])


def run_fsdp2(arguments, rest: list[str]) -> dict:
    script = pathlib.Path(__file__).parent / "fsdp2_losses.py"
    command = [arguments.python, "-B", str(script), f"--ranks={arguments.ranks}"]
    return run("FSDP2", command + rest)


def faults_of(name: str, ours: dict, theirs: dict) -> list[str]:
    faults = []
    for key in ("weights", "tokens"):
        if ours[key] != theirs[key]:
            faults.append(f"the {key} of {name} differ at the start")
    if len(ours["losses"]) != len(theirs["losses"]):
        return faults + [f"the number of steps of {name} differs"]
    print(f"step {name:>16}            FSDP2   difference")
    for step, (a, b) in enumerate(zip(ours["losses"], theirs["losses"])):
        difference = abs(a - b) / abs(b)
        print(f"{step:4} {a:16.9f} {b:16.9f} {difference:12.1e}")
        if not (math.isfinite(a) and difference <= TOLERANCE):
            faults.append(f"the losses of {name} differ in step {step}")
    print(f"a step: {ours['step_ms']:.1f} ms, FSDP2 {theirs['step_ms']:.1f} ms")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", required=True, help="fsdp")
    parser.add_argument("--program", required=True, help="gpt_losses")
    parser.add_argument("--python", required=True, help="one that has torch")
    parser.add_argument("--ranks", type=int, default=2)
    arguments, rest = parser.parse_known_args()
    if not os.access(arguments.python, os.X_OK):
        print(f"skipped: this libtorch has no Python beside it ({arguments.python})")
        return processes.SKIPPED
    try:
        theirs = run_fsdp2(arguments, rest)
        ours = {name: run_ours(name, arguments, rest) for name in BACKENDS}
    except processes.Failed as error:
        is_skip = error.status == processes.SKIPPED
        print(f"{'skipped' if is_skip else 'FAILED'}: {error}")
        return processes.SKIPPED if is_skip else 1
    faults = []
    for name, result in ours.items():
        faults += faults_of(name, result, theirs)
    print("FAILED: " + "; ".join(faults) if faults else "the losses agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
