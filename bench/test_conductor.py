#!/usr/bin/env python3
"""Tests of the conductor: statistics, rows, rounds and processes. No timing."""

import importlib.util
import pathlib
import sys
import tempfile
import time
import unittest

if importlib.util.find_spec("numpy") is None:
    print(f"skipped: {sys.executable} has no numpy")
    sys.exit(77)

from conductor import picture, processes, rounds, rows, statistics
from conductor.processes import Side, SideFailed, Sides
from conductor.statistics import Estimate


class StatisticsTest(unittest.TestCase):
    def test_equal_sides_have_ratio_one_and_no_width(self):
        estimate = statistics.ratio([2.0, 3.0, 5.0], [2.0, 3.0, 5.0])
        self.assertEqual(estimate, Estimate(1.0, 1.0, 1.0, 3))
        self.assertTrue(statistics.is_narrow(estimate))

    def test_a_ratio_is_the_geometric_mean_over_rounds(self):
        estimate = statistics.ratio([2.0, 8.0], [1.0, 1.0])
        self.assertAlmostEqual(estimate.value, 4.0)
        self.assertAlmostEqual(estimate.low, 2.0)
        self.assertAlmostEqual(estimate.high, 8.0)
        self.assertFalse(statistics.is_narrow(estimate))

    def test_a_ratio_and_its_inverse_agree(self):
        a, b = [1.0, 1.2, 1.1, 0.9], [2.0, 2.1, 2.2, 1.9]
        there, back = statistics.ratio(a, b), statistics.ratio(b, a)
        self.assertAlmostEqual(there.value * back.value, 1.0)
        self.assertAlmostEqual(there.low * back.high, 1.0, places=2)

    def test_more_rounds_make_the_interval_narrower(self):
        figures = [1.0, 1.1, 0.9, 1.05, 0.95] * 8
        ones = [1.0] * len(figures)
        few = statistics.ratio(figures[:5], ones[:5])
        many = statistics.ratio(figures, ones)
        self.assertLess(many.high - many.low, (few.high - few.low) / 2)
        self.assertTrue(few.low < few.value < few.high)

    def test_the_same_rounds_give_the_same_interval(self):
        figures = [1.0, 1.3, 0.8]
        self.assertEqual(statistics.mean(figures), statistics.mean(figures))

    def test_differences_may_be_nearly_zero_or_below(self):
        estimate = statistics.ratio_of_differences(
            [1.0, 1.0], [1.1, 0.9], [3.0, 3.0], [1.0, 1.0]
        )
        self.assertAlmostEqual(estimate.value, 0.0)
        self.assertAlmostEqual(estimate.low, -0.05)
        self.assertAlmostEqual(estimate.high, 0.05)
        self.assertFalse(statistics.is_close(estimate))

    def test_the_slowest_rank_counts_by_its_median(self):
        figure = statistics.round_figure([[1.0, 9.0, 1.0], [2.0, 2.0, 3.0]])
        self.assertEqual(figure, 2.0)

    def test_no_round_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "no round"):
            statistics.mean([])


class RowsTest(unittest.TestCase):
    def ok(self, name, value, low, high):
        return rows.make(name, Estimate(value, low, high, 10))["ok"]

    def test_at_most_holds_while_the_interval_reaches_the_bound(self):
        name = "step_vs_ddp.comm_bound"  # at most 0.70
        self.assertTrue(self.ok(name, 0.50, 0.49, 0.51))
        self.assertTrue(self.ok(name, 0.72, 0.69, 0.75))
        self.assertFalse(self.ok(name, 0.72, 0.71, 0.73), "low is above")
        self.assertFalse(self.ok(name, 0.74, 0.69, 0.79), "too far above")

    def test_at_least_is_the_mirror_image(self):
        name = "shm_reduce_scatter_vs_memcpy.64MB"  # at least 0.80
        self.assertTrue(self.ok(name, 0.95, 0.94, 0.96))
        self.assertTrue(self.ok(name, 0.78, 0.75, 0.81))
        self.assertFalse(self.ok(name, 0.78, 0.77, 0.79), "high is below")
        self.assertFalse(self.ok(name, 0.76, 0.71, 0.81), "too far below")

    def test_a_row_without_a_bound_has_no_verdict(self):
        row = rows.make("aa.comm_bound", Estimate(1.0, 0.9, 1.1, 10))
        self.assertNotIn("ok", row)
        self.assertNotIn("bound", row)

    def test_a_group_replaces_its_own_rows_only(self):
        old = [
            {"name": "a", "group": "engine", "value": 1},
            {"name": "gone", "group": "engine", "value": 1},
            {"name": "m", "group": "memory", "value": 1},
        ]
        new = [{"name": "a", "value": 2}, {"name": "b", "value": 2}]
        merged = rows.merge(old, new, "engine", is_complete=True)
        self.assertEqual(
            {row["name"]: (row["group"], row["value"]) for row in merged},
            {"m": ("memory", 1), "a": ("engine", 2), "b": ("engine", 2)},
        )

    def test_a_part_of_a_group_replaces_rows_of_the_same_name_only(self):
        old = [{"name": name, "group": "engine"} for name in ("a", "b")]
        merged = rows.merge(old, [{"name": "a"}], "engine", is_complete=False)
        self.assertEqual([row["name"] for row in merged], ["b", "a"])

    def test_equal_sides_that_differ_mark_all_rows_of_the_run(self):
        run = [{"name": "aa.x", "value": 1.04}, {"name": "y", "value": 2.0}]
        rows.mark_noisy(run)
        self.assertTrue(all(row["noisy"] for row in run))
        calm = [{"name": "aa.x", "value": 0.98}, {"name": "y", "value": 2.0}]
        rows.mark_noisy(calm)
        self.assertFalse(any("noisy" in row for row in calm))

    def test_what_was_written_is_read_again(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "new" / "results.json"
            self.assertEqual(rows.read(path), [])
            written = [{"name": "a", "value": 1.5}, {"name": "b", "value": 2.5}]
            rows.write(path, written)
            self.assertEqual(rows.read(path), written)

    def test_the_table_tells_missed_bounds(self):
        missed = rows.make(
            "op_cost_vs_plain", Estimate(1.5, 1.4, 1.6, 10)
        )
        self.assertRegex(rows.table([missed]), r"most 1\.02 +MISSED")

    def test_the_picture_has_a_bar_per_side(self):
        text = picture.draw(
            [
                {"name": f"step_ms.{side}.comm_bound", "value": 10.0}
                for side in ("ours", "ddp")
            ]
        )
        self.assertEqual(text.count("<rect"), 1 + 2)
        self.assertIn(">ddp<", text)


class FakeSide:
    def __init__(self, seconds):
        self.tokens = []
        self._seconds = iter(seconds)

    def run(self, measure, count):
        self.tokens.append((measure, count))

    def seconds(self, measure, count):
        self.run(measure, count)
        return [[next(self._seconds)] * count] * 2


class SilentProgress:
    def show(self, text):
        pass


class RoundsTest(unittest.TestCase):
    def play(self, a, b, limits):
        sides = {"a": FakeSide(a), "b": FakeSide(b)}
        figures = rounds.play(
            "test",
            {name: rounds.Player(side) for name, side in sides.items()},
            lambda figures: {"r": statistics.ratio(figures["a"], figures["b"])},
            limits,
            SilentProgress(),
            statistics.is_narrow,
        )
        return figures, sides

    def test_ends_at_the_least_rounds_when_the_ratio_is_known(self):
        figures, sides = self.play([2.0] * 9, [1.0] * 9, rounds.Limits(3, 9))
        self.assertEqual(figures, {"a": [2.0] * 3, "b": [1.0] * 3})
        self.assertEqual(sides["a"].tokens, [("step", 6)] + [("step", 4)] * 3)

    def test_ends_at_the_most_rounds_when_it_is_not(self):
        figures, _ = self.play([1.0, 4.0] * 4, [1.0] * 8, rounds.Limits(2, 8))
        self.assertEqual(len(figures["a"]), 8)

    def test_ends_when_the_time_is_over(self):
        limits = rounds.Limits(2, 8, seconds=-1)
        figures, _ = self.play([1.0, 4.0] * 4, [1.0] * 8, limits)
        self.assertEqual(len(figures["a"]), 2)


ANSWERING = """
import sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    print('{"seconds": [0.5]}', flush=True)
"""


def python(code):
    return [sys.executable, "-S", "-c", code]


class ProcessesTest(unittest.TestCase):
    def test_tokens_are_answered_by_all_ranks(self):
        with Sides() as sides:
            sides.start("side", python(ANSWERING))
            sides.wait_ready()
            self.assertEqual(sides["side"].seconds("step", 1), [[0.5], [0.5]])

    def test_a_side_that_ends_is_named_with_its_last_lines(self):
        side = Side("broken", python("import sys; sys.exit('what went wrong')"))
        with self.assertRaisesRegex(
            SideFailed, "rank 0/2 of broken has ended, status 1.*\n.*went wrong"
        ):
            side.wait_ready()
        side.kill()

    def test_a_side_that_is_silent_is_not_waited_for_for_ever(self):
        side = Side("silent", python("import time; time.sleep(60)"), ranks=1)
        rank = side._ranks[0]
        with self.assertRaisesRegex(SideFailed, "silent has not answered in time"):
            rank.receive(time.monotonic() + 0.05)
        side.kill()

    def test_what_is_no_answer_is_an_error(self):
        side = Side("odd", python("print('hello', flush=True)"), ranks=1)
        with self.assertRaisesRegex(SideFailed, "no JSON, but b'hello'"):
            side.wait_ready()
        side.kill()

    def test_ranks_beyond_the_cores_share_them(self):
        cores = processes.cores()
        of_two = [processes.core_of(rank, 2) for rank in range(2)]
        self.assertEqual(of_two, [cores[0], cores[-1]])
        of_four = [processes.core_of(rank, 4) for rank in range(4)]
        self.assertEqual(of_four, [cores[0]] * 2 + [cores[-1]] * 2)


if __name__ == "__main__":
    unittest.main()
