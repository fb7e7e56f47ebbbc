"""Runs processes that belong together: all end well, or all end."""

import ctypes
import os
import signal
import subprocess
import tempfile
import time


SKIPPED = 77  # exit status: what is needed is not installed


class Failed(Exception):
    """A process failed; `status` is its exit status, or 1 for a time-out."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


def _die_with_parent():
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_together(commands: dict[str, list[str]], limit_s: float) -> dict[str, str]:
    """Runs all commands at once and returns their outputs, both by name.

    When one fails, or the time is over, all are killed, and Failed has the name
    of the first and what it wrote. One thread is used per process.
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    deadline = time.monotonic() + limit_s
    running = {}
    outputs = {}
    try:
        for name, command in commands.items():
            outputs[name] = (
                tempfile.TemporaryFile("w+"),
                tempfile.TemporaryFile("w+"),
            )
            running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=outputs[name][0],
                stderr=outputs[name][1],
                env=environment,
                preexec_fn=_die_with_parent,
            )
        _wait(running, outputs, deadline, limit_s)
        return {name: _text(files[0]) for name, files in outputs.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _wait(running, outputs, deadline, limit_s):
    waiting = dict(running)
    while waiting:
        for name, process in list(waiting.items()):
            status = process.poll()
            if status is None:
                continue
            if status != 0:
                text = _text(outputs[name][1])
                raise Failed(f"{name}, status {status}: {text}", status)
            del waiting[name]
        if waiting and time.monotonic() > deadline:
            name = next(iter(waiting))
            raise Failed(
                f"{', '.join(waiting)} not done after {limit_s:g} s; "
                f"{name} wrote:\n{_text(outputs[name][1])}"
            )
        time.sleep(0.01)


def _text(file) -> str:
    file.seek(0)
    return file.read().strip()
