"""Group engine: the time of training steps."""

import dataclasses

from . import rounds, rows, statistics, workloads
from .processes import Sides

SHM = {"LIBFSDP_BACKEND": "shm"}
GLOO = {"LIBFSDP_BACKEND": "gloo"}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A row: the times of one side over those of another."""

    row: str
    side: str
    base: str


def _ratios(workload, has_peers, has_zero3):
    """The rows of a workload that are ratios of step times."""
    name = workload.name
    ratios = [
        Ratio(f"aa.{name}", "local_again", "local"),
        Ratio(f"step_vs_local.{name}", "ours", "local"),
    ]
    if has_peers and workload is not workloads.COMPUTE_BOUND:
        ratios.append(Ratio(f"step_vs_fsdp2.{name}", "ours", "fsdp2"))
    if has_peers and workload is workloads.COMM_BOUND:
        ratios += [
            Ratio(f"step_vs_ddp.{name}", "ours", "ddp"),
            Ratio(f"no_shard_step_vs_ddp.{name}", "ours_no_shard", "ddp"),
            Ratio(f"gloo_step_vs_fsdp2.{name}", "ours_gloo", "fsdp2"),
        ]
        if has_zero3:
            ratios.append(Ratio(f"step_vs_zero3.{name}", "ours", "zero3"))
    return ratios


def _all_sides(bench, workload, has_zero3):
    """How to start each side: its command, and what its environment has."""
    sides = {
        "local": (bench.step("local", workload), {}),
        "local_again": (bench.step("local", workload), {}),
        "ours": (bench.step("ours", workload), SHM),
        "ours_gloo": (bench.step("ours", workload), GLOO),
        "ours_no_shard": (bench.step("no_shard", workload), SHM),
    }
    if bench.has_peers:
        sides["python_local"] = (bench.peer("local", workload), {})
        sides["ddp"] = (bench.peer("ddp", workload), {})
        sides["fsdp2"] = (bench.peer("fsdp2", workload), {})
    if has_zero3:
        sides["zero3"] = (bench.peer("zero3", workload), {})
    return sides


def _is_wanted(side, bench, ratios):
    """In a hurry, sides without a ratio are left out."""
    return (
        not bench.is_quick
        or side == "python_local"
        or any(side in (ratio.side, ratio.base) for ratio in ratios)
    )


def _play_steps(bench, workload, ratios, has_zero3, estimates_of):
    with Sides() as sides:
        commands = _all_sides(bench, workload, has_zero3)
        for name, (command, environment) in commands.items():
            if _is_wanted(name, bench, ratios):
                sides.start(name, command, environment=environment)
        bench.progress.show(f"{workload.name}: starting {', '.join(sides)}")
        sides.wait_ready()
        return bench.play(
            workload.name,
            {name: rounds.Player(sides[name]) for name in sides},
            estimates_of,
        )


def _steps(bench, workload):
    """The rows of one workload on two ranks."""
    has_zero3 = bench.has_deepspeed and workload is workloads.COMM_BOUND
    ratios = _ratios(workload, bench.has_peers, has_zero3)

    def estimates_of(figures):
        return {
            ratio.row: statistics.ratio(figures[ratio.side], figures[ratio.base])
            for ratio in ratios
        }

    figures = _play_steps(bench, workload, ratios, has_zero3, estimates_of)
    result = [rows.make(*each) for each in estimates_of(figures).items()]
    result += _step_times(figures, workload.name)
    rows.mark_noisy(result)
    return result


def _step_times(figures, what):
    return [
        rows.make(
            f"step_ms.{side}.{what}",
            statistics.mean([1000 * figure for figure in figures[side]]),
            "ms",
        )
        for side in figures
    ]


def comm_bound(bench):
    return _steps(bench, workloads.COMM_BOUND)


def compute_bound(bench):
    return _steps(bench, workloads.COMPUTE_BOUND)


def tiny_units(bench):
    return _steps(bench, workloads.TINY_UNITS)


def oversubscribed(bench):
    """Two ranks per core."""
    workload = workloads.COMM_BOUND
    row = "oversubscribed_step_vs_fsdp2.4ranks"

    def estimates_of(figures):
        if not bench.has_peers:
            return {}
        return {row: statistics.ratio(figures["ours"], figures["fsdp2"])}

    with Sides() as sides:
        options = {"ranks": 4}
        sides.start("ours", bench.step("ours", workload), **options)
        if bench.has_peers:
            sides.start("fsdp2", bench.peer("fsdp2", workload), **options)
        sides.wait_ready()
        figures = bench.play(
            "oversubscribed, 4 ranks",
            {name: rounds.Player(sides[name]) for name in sides},
            estimates_of,
        )
    result = [rows.make(*each) for each in estimates_of(figures).items()]
    return result + _step_times(figures, f"{workload.name}.4ranks")


def host_cost(bench):
    """What the libraries themselves cost, with one rank: there is no traffic."""
    workload = workloads.TINY_UNITS
    row = "host_cost_per_unit_vs_fsdp2"

    def estimates_of(figures):
        if not bench.has_peers:
            return {}
        return {
            row: statistics.ratio_of_differences(
                figures["ours"],
                figures["local"],
                figures["fsdp2"],
                figures["python_local"],
            )
        }

    with Sides() as sides:
        one = {"ranks": 1}
        sides.start("local", bench.step("local", workload), **one)
        sides.start("ours", bench.step("ours", workload), **one)
        if bench.has_peers:
            sides.start("python_local", bench.peer("local", workload), **one)
            sides.start("fsdp2", bench.peer("fsdp2", workload), **one)
        sides.wait_ready()
        figures = bench.play(
            "host cost, one rank",
            {name: rounds.Player(sides[name]) for name in sides},
            estimates_of,
            statistics.is_close,
        )
    result = [rows.make(*each) for each in estimates_of(figures).items()]
    for side, base in (("ours", "local"), ("fsdp2", "python_local")):
        if side in figures:
            microseconds = [
                [1e6 * figure / workload.units for figure in figures[name]]
                for name in (side, base)
            ]
            estimate = statistics.mean_difference(*microseconds)
            result.append(rows.make(f"host_us_per_unit.{side}", estimate, "us"))
    return result


def operator_cost(bench):
    """An operator that reads no parameter, with and without an open region."""
    row = "op_cost_vs_plain"

    def estimates_of(figures):
        return {row: statistics.ratio(figures["in_region"], figures["plain"])}

    with Sides() as sides:
        sides.start("operators", bench.program("bench_operator_cost"), ranks=1)
        sides.wait_ready()
        players = {
            measure: rounds.Player(sides["operators"], measure)
            for measure in ("plain", "in_region")
        }
        figures = bench.play("cost of operators", players, estimates_of)
    return [rows.make(*each) for each in estimates_of(figures).items()]


PARTS = {
    "comm_bound": comm_bound,
    "compute_bound": compute_bound,
    "tiny_units": tiny_units,
    "oversubscribed": oversubscribed,
    "host_cost": host_cost,
    "operator_cost": operator_cost,
}
