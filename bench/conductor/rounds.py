"""Rounds of interleaved runs, until the ratios are known well enough."""

import dataclasses
import random
import time

from . import statistics

STEPS = 4  # that a side runs in a round


@dataclasses.dataclass(frozen=True)
class Limits:
    least_rounds: int = 10
    most_rounds: int = 60
    seconds: float = 180


FULL = Limits()
QUICK = Limits(least_rounds=5, most_rounds=10, seconds=20)


@dataclasses.dataclass(frozen=True)
class Player:
    """What is measured of a side. In each round it makes one run."""

    side: object
    measure: str = "step"
    count: int = STEPS
    warm_up: int = 6

    def play(self):
        seconds = self.side.seconds(self.measure, self.count)
        return statistics.round_figure(seconds)


def play(title, players, estimates_of, limits, progress, is_known):
    """Lets the players run in turn, in another order each round, and returns
    their figures in seconds: lists by name, one entry per round.

    `estimates_of` makes of such figures the estimates by name that matter: it
    goes on until `is_known` holds for all of them, within `limits`."""
    for name, player in players.items():
        progress.show(f"{title}: warming {name} up")
        player.side.run(player.measure, player.warm_up)
    figures = {name: [] for name in players}
    order = list(players)
    shuffle = random.Random(1).shuffle
    begin = time.monotonic()
    for number in range(1, limits.most_rounds + 1):
        shuffle(order)
        for name in order:
            figures[name].append(players[name].play())
        estimates = estimates_of(figures)
        took = time.monotonic() - begin
        progress.show(_state(title, number, limits, estimates, took))
        if number >= limits.least_rounds and (
            all(is_known(each) for each in estimates.values())
            or took > limits.seconds
        ):
            break
    return figures


def _state(title, number, limits, estimates, took):
    text = f"{title}: round {number} of at most {limits.most_rounds}"
    text += f", {took:.0f} s"
    if number > 1 and estimates:
        widest = max(
            estimates,
            key=lambda name: estimates[name].high - estimates[name].low,
        )
        estimate = estimates[widest]
        text += (
            f"; widest: {widest} {estimate.value:.3f}"
            f" [{estimate.low:.3f}, {estimate.high:.3f}]"
        )
    return text
