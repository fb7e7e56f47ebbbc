"""Group collectives: shared memory against plain copies, and against Gloo."""

from . import rounds, rows, statistics
from .processes import Sides

# Each against the copies of memory that it cannot do without.
AGAINST_COPIES = {
    "shm_all_gather_vs_memcpy.64MB": ("copy_twice", "all_gather"),
    "shm_reduce_scatter_vs_memcpy.64MB": ("copy_and_add", "reduce_scatter"),
}
LATENCY = "shm_latency_vs_gloo.16KB"


def _start(sides, bench, backend):
    sides.start(
        backend,
        bench.program("bench_collectives"),
        environment={"LIBFSDP_BACKEND": backend},
    )


def bandwidth(bench):
    def estimates_of(figures):
        return {
            row: statistics.ratio(figures[copies], figures[collective])
            for row, (copies, collective) in AGAINST_COPIES.items()
        }

    with Sides() as sides:
        _start(sides, bench, "shm")
        sides.wait_ready()
        measures = [each for pair in AGAINST_COPIES.values() for each in pair]
        figures = bench.play(
            "bandwidth of shared memory",
            {name: rounds.Player(sides["shm"], name) for name in measures},
            estimates_of,
        )
    result = [rows.make(*each) for each in estimates_of(figures).items()]
    return result + [
        rows.make(
            f"collective_ms.{name}.64MB",
            statistics.mean([1e3 * seconds for seconds in figures[name]]),
            "ms",
        )
        for name in figures
    ]


def latency(bench):
    def estimates_of(figures):
        return {LATENCY: statistics.ratio(figures["shm"], figures["gloo"])}

    with Sides() as sides:
        for backend in ("shm", "gloo"):
            _start(sides, bench, backend)
        sides.wait_ready()
        figures = bench.play(
            "latency of shared memory",
            {name: rounds.Player(sides[name], "latency") for name in sides},
            estimates_of,
        )
    result = [rows.make(*each) for each in estimates_of(figures).items()]
    return result + [
        rows.make(
            f"collective_us.{name}_all_gather.16KB",
            statistics.mean([1e6 * seconds for seconds in figures[name]]),
            "us",
        )
        for name in figures
    ]


PARTS = {"bandwidth": bandwidth, "latency": latency}
