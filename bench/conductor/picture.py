"""The step times as a picture: one bar per side, one block per workload."""

import html

BAR = 18  # pixels
GAP = 6
LABEL = 150
WIDTH = 420  # of the longest bar
OURS = "#1b6ca8"
OTHERS = "#b9b9b9"


def _step_times(rows):
    """By workload: side and row."""
    found = {}
    for row in rows:
        kind, *rest = row["name"].split(".", 2)
        if kind == "step_ms":
            side, workload = rest
            found.setdefault(workload, []).append((side, row))
    return found


def _bar(y, side, row, longest):
    width = WIDTH * row["value"] / longest
    colour = OURS if side.startswith("ours") else OTHERS
    baseline = y + BAR - 5
    return [
        f'<text x="{LABEL - 8}" y="{baseline}" text-anchor="end">'
        f"{html.escape(side)}</text>",
        f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}"'
        f' fill="{colour}"/>',
        f'<text x="{LABEL + width + 6:.1f}" y="{baseline}">'
        f'{row["value"]:.1f} ms</text>',
    ]


def draw(rows):
    """The text of an SVG file."""
    parts = []
    y = 10
    for workload, bars in _step_times(rows).items():
        parts.append(
            f'<text x="{LABEL}" y="{y + 14}" font-weight="bold">'
            f"{html.escape(workload)}: a step</text>"
        )
        y += 24
        longest = max(row["value"] for _, row in bars)
        for side, row in sorted(bars, key=lambda bar: bar[1]["value"]):
            parts += _bar(y, side, row, longest)
            y += BAR + GAP
        y += 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 100}"'
        f' height="{y}" font-family="sans-serif" font-size="13">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def write(path, rows):
    """Where no step time is known there is nothing to draw."""
    if _step_times(rows):
        path.write_text(draw(rows))
