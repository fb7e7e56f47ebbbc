"""Group memory: what a rank holds. Counted, so one round is enough."""

from . import rows, workloads
from .processes import Sides
from .statistics import Estimate

WORKLOAD = workloads.COMM_BOUND
STEPS = 3
GRADIENT_SLOTS = 2  # whole gradients of units at once: arriving, on their way


def _row(name, value, unit="ratio"):
    return rows.make(name, Estimate(value, value, value, 1), unit)


def _measure(bench, name, command, measure, **options):
    """The values that ranks answer with; of each the largest over the ranks."""
    with Sides() as sides:
        sides.start(name, command, **options)
        bench.progress.show(f"memory: {name}")
        sides.wait_ready()
        answers = [each["values"] for each in sides[name].run(measure, STEPS)]
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


def peak_theory(ours):
    """What a rank cannot do without: its share, and whole units on their way."""
    slots = ours["weight_slots"] + GRADIENT_SLOTS
    return ours["rest_theory_bytes"] + slots * ours["largest_unit_bytes"]


def state(bench):
    ours = _measure(
        bench,
        "ours",
        bench.program("bench_memory", WORKLOAD),
        "state",
        environment={"LIBFSDP_BACKEND": "shm"},
    )
    result = [
        _row(
            "rest_state_vs_theory",
            ours["rest_bytes"] / ours["rest_theory_bytes"],
        ),
        _row(
            "peak_state_vs_theory",
            ours["peak_state_bytes"] / peak_theory(ours),
        ),
        _row(
            "peak_state_and_staging_vs_theory",
            (ours["peak_state_bytes"] + ours["staging_bytes"])
            / peak_theory(ours),
        ),
    ]
    for name in ("rest_bytes", "staging_bytes", "peak_bytes"):
        result.append(_row(name, ours[name], "bytes"))
    if bench.has_peers:
        command = bench.peer_counted("fsdp2", WORKLOAD)
        fsdp2 = _measure(bench, "fsdp2", command, "peak")
        result += [
            _row(
                f"peak_bytes_vs_fsdp2.{WORKLOAD.name}",
                ours["peak_bytes"] / fsdp2["peak_bytes"],
            ),
            _row("peak_bytes.fsdp2", fsdp2["peak_bytes"], "bytes"),
        ]
    return result


PARTS = {"state": state}
