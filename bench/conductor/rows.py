"""The rows of results.json: one per figure, with its bound where it has one."""

import json
import os

SLACK = 0.03  # of a value whose interval reaches the bound
NOISE = 0.03  # of aa.WORKLOAD, which should be 1

# What the library promises. A ratio of times or bytes is at most its bound;
# bandwidths as a share of memcpy are at least theirs.
AT_MOST = {
    "step_vs_local.comm_bound": 1.10,
    "step_vs_local.compute_bound": 1.06,
    "step_vs_local.tiny_units": 1.40,
    "step_vs_ddp.comm_bound": 0.70,
    "step_vs_fsdp2.comm_bound": 0.33,
    "step_vs_fsdp2.tiny_units": 0.14,
    "no_shard_step_vs_ddp.comm_bound": 0.75,
    "gloo_step_vs_fsdp2.comm_bound": 0.88,
    "step_vs_zero3.comm_bound": 0.25,
    "oversubscribed_step_vs_fsdp2.4ranks": 0.5,
    "host_cost_per_unit_vs_fsdp2": 0.08,
    "op_cost_vs_plain": 1.02,
    "shm_latency_vs_gloo.16KB": 0.05,
    "rest_state_vs_theory": 1.01,
    "peak_state_vs_theory": 1.02,
    "peak_bytes_vs_fsdp2.comm_bound": 0.95,
}
AT_LEAST = {
    "shm_all_gather_vs_memcpy.64MB": 0.65,
    "shm_reduce_scatter_vs_memcpy.64MB": 0.80,
}


def bound_of(name):
    """The bound of a row and what tells whether (value, low, high) keep it; None
    where it has none."""
    if name in AT_MOST:
        bound = AT_MOST[name]
        return bound, lambda value, low, high: (
            low <= bound and value <= bound + SLACK
        )
    if name in AT_LEAST:
        bound = AT_LEAST[name]
        return bound, lambda value, low, high: (
            high >= bound and value >= bound - SLACK
        )
    return None


def make(name, estimate, unit="ratio"):
    row = {
        "name": name,
        "value": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "rounds": estimate.rounds,
        "unit": unit,
    }
    bound = bound_of(name)
    if bound is not None:
        row["bound"], keeps = bound
        row["at"] = "least" if name in AT_LEAST else "most"
        row["ok"] = keeps(estimate.value, estimate.low, estimate.high)
    return row


def mark_noisy(rows):
    """Marks all rows of one run where it says that equal sides differed."""
    if any(
        row["name"].startswith("aa.") and abs(row["value"] - 1) > NOISE
        for row in rows
    ):
        for row in rows:
            row["noisy"] = True


def merge(old, new, group, is_complete):
    """`old` with the rows of `group` replaced by `new`; where the group was not
    run completely, only those of the same names. Other groups' rows stay."""
    names = {row["name"] for row in new}
    kept = [
        row
        for row in old
        if row["name"] not in names
        and not (is_complete and row.get("group") == group)
    ]
    return kept + [dict(row, group=group) for row in new]


def read(path):
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return []


def write(path, rows):
    """Replaces the file as a whole, so that a reader never sees half of it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.new"
    with open(temporary, "w") as file:
        lines = ",\n".join(json.dumps(row) for row in rows)
        file.write(f"[\n{lines}\n]\n")
    os.replace(temporary, path)


def _cell(value, unit):
    return f"{value:,.0f}" if unit == "bytes" else f"{value:.4g}"


def _verdict(row):
    if "ok" not in row:
        return ""
    return "ok" if row["ok"] else "MISSED"


def table(rows):
    """All rows as aligned text."""
    lines = [["", "value", "low", "high", "unit", "rounds", "bound", ""]]
    for row in rows:
        unit = row["unit"]
        bound = f"{row['at']} {row['bound']:g}" if "bound" in row else ""
        notes = [_verdict(row), "noisy" if row.get("noisy") else ""]
        lines.append(
            [row["name"]]
            + [_cell(row[key], unit) for key in ("value", "low", "high")]
            + [unit, str(row["rounds"]), bound]
            + [" ".join(note for note in notes if note)]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 4, 6, 7) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
