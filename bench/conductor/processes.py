"""The processes of a side: one per rank, each pinned to one core."""

import ctypes
import json
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import tempfile
import time

START_LIMIT_S = 120
RUN_LIMIT_S = 120
END_LIMIT_S = 5
LAST_LINES = 20

# Without these glibc gives memory of large tensors back and has to take it
# again page by page, which costs more than the step; the same for all sides.
MALLOC = (
    "glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=9223372036854775807"
)


class SideFailed(Exception):
    """A process of a side ended or did not answer."""


def cores():
    """The two cores that are used, however many there are."""
    return sorted(os.sched_getaffinity(0))[:2]


def core_of(rank, ranks):
    """A core of its own for each of two ranks; neighbours share where ranks
    exceed cores."""
    return cores()[rank * len(cores()) // ranks]


def _become_child(core):
    """In the child: it dies with the conductor, however that ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, {core})


class Rank:
    """One process. It reads tokens from stdin and answers in lines of JSON."""

    def __init__(self, name, command, environment, core):
        self.name = name
        self._errors = tempfile.TemporaryFile()
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            bufsize=0,
            preexec_fn=lambda: _become_child(core),
        )

    def send(self, line):
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def receive(self, deadline):
        """The next line of its stdout, as JSON."""
        stdout = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0, deadline - time.monotonic())):
                    raise self._failure("has not answered in time")
                read = os.read(stdout.fileno(), 65536)
                if not read:
                    raise self._failure("has ended")
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        try:
            return json.loads(line)
        except ValueError:
            raise self._failure(f"wrote no JSON, but {line!r}") from None

    def close(self):
        """No more tokens: the process is to end."""
        self._process.stdin.close()

    def end(self, deadline):
        try:
            self._process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _failure(self, what):
        try:
            status = self._process.wait(1)
            what = f"{what}, status {status}"
        except subprocess.TimeoutExpired:
            pass
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").rstrip()
        lines = text.splitlines()[-LAST_LINES:] or ["(nothing)"]
        return SideFailed(
            f"{self.name} {what}. Its last lines:\n  " + "\n  ".join(lines)
        )


class Side:
    """All ranks of one side. Between two calls of run() they sleep."""

    def __init__(self, name, command, ranks=2, environment=None):
        self.name = name
        self._folder = tempfile.mkdtemp(prefix="fsdp_bench.")
        self._ranks = []
        command = [
            argument.replace("{store}", self._store()) for argument in command
        ]
        try:
            for rank in range(ranks):
                self._ranks.append(
                    Rank(
                        f"rank {rank}/{ranks} of {name}",
                        command,
                        self._environment(rank, ranks, environment or {}),
                        core_of(rank, ranks),
                    )
                )
        except BaseException:
            self.kill()
            raise

    def wait_ready(self):
        deadline = time.monotonic() + START_LIMIT_S
        for rank in self._ranks:
            rank.receive(deadline)

    def run(self, measure, count):
        """Deals a token to all ranks and returns their answers, by rank."""
        for rank in self._ranks:
            rank.send(f"run {measure} {count}")
        deadline = time.monotonic() + RUN_LIMIT_S
        return [rank.receive(deadline) for rank in self._ranks]

    def seconds(self, measure, count):
        return [answer["seconds"] for answer in self.run(measure, count)]

    def end(self):
        for rank in self._ranks:
            rank.close()
        deadline = time.monotonic() + END_LIMIT_S
        for rank in self._ranks:
            rank.end(deadline)
        self._remove_folder()

    def kill(self):
        for rank in self._ranks:
            rank.kill()
        self._remove_folder()

    def _store(self):
        return os.path.join(self._folder, "store")

    def _remove_folder(self):
        shutil.rmtree(self._folder, ignore_errors=True)

    def _environment(self, rank, ranks, more):
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("LIBFSDP_", "TORCHELASTIC_"))
        }
        return kept | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "LIBFSDP_JOB": pathlib.Path(self._folder).name,
            "LIBFSDP_STORE": f"file://{self._store()}",
            "LIBFSDP_TIMEOUT": str(RUN_LIMIT_S),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLIBC_TUNABLES": MALLOC,
        } | more


class Sides:
    """Sides by name, which all end with the scope."""

    def __init__(self):
        self._sides = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for side in self._sides.values():
            if kind is None:
                side.end()
            else:
                side.kill()

    def start(self, name, command, **options):
        self._sides[name] = Side(name, command, **options)

    def wait_ready(self):
        for side in self._sides.values():
            side.wait_ready()

    def __getitem__(self, name):
        return self._sides[name]

    def __iter__(self):
        return iter(self._sides)
