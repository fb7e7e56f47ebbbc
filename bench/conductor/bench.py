"""What all groups share: where the programs are and how long they may run."""

import importlib.util
import pathlib
import sys

from . import rounds, statistics

FOLDER = pathlib.Path(__file__).resolve().parents[1]


class Bench:
    def __init__(self, build, quick, progress):
        self._build = pathlib.Path(build)
        self.is_quick = quick
        self.progress = progress
        self.has_peers = importlib.util.find_spec("torch") is not None
        self.has_deepspeed = (
            not quick and importlib.util.find_spec("deepspeed") is not None
        )

    def say_what_is_left_out(self):
        if not self.has_peers:
            self.progress.say(
                f"skipped: all peers, since {sys.executable} has no torch"
            )
        elif not self.has_deepspeed:
            why = "QUICK=1" if self.is_quick else "deepspeed is not installed"
            self.progress.say(f"skipped: DeepSpeed ZeRO-3, since {why}")

    def program(self, name, workload=None):
        command = [str(self._build / "bin" / name)]
        return command + (workload.arguments() if workload else [])

    def step(self, side, workload):
        return self.program("bench_step", workload) + [f"--side={side}"]

    def peer(self, side, workload):
        return [
            sys.executable,
            "-B",
            str(FOLDER / "peers" / "main.py"),
            f"--side={side}",
            "--store={store}",
        ] + workload.arguments()

    def peer_counted(self, side, workload):
        library = self._build / "lib" / "libbench_counting_allocator.so"
        return self.peer(side, workload) + [f"--count-bytes={library}"]

    def play(
        self,
        title,
        players,
        estimates_of,
        is_known=statistics.is_narrow,
    ):
        limits = rounds.QUICK if self.is_quick else rounds.FULL
        return rounds.play(
            title, players, estimates_of, limits, self.progress, is_known
        )
