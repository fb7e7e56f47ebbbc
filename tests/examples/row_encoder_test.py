#!/usr/bin/env python3
"""Runs the row encoder for a few steps and checks what it prints and writes.

usage: row_encoder_test.py PROGRAM DIGITS_CSV
"""

import csv
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = ""
DIGITS = ""
# torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=20,
# cycle_momentum=False) of torch 2.13.0, by step.
RATES = {
    1: 7.999999999999999e-05,
    2: 0.0002633436854000504,
    5: 0.0018166563145999494,
    6: 0.002,
    7: 0.001974928012470175,
    13: 0.0010000039999999999,
    19: 2.5079987529825107e-05,
    20: 8e-09,
}


def call(*arguments: str, data: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [PROGRAM, "--data", data or DIGITS, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )


class RowEncoderTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def table(self, text: str) -> str:
        path = self.folder / "table.csv"
        path.write_text(text)
        return str(path)

    def summary(self, *arguments: str) -> dict:
        path = self.folder / "new folder" / "summary.json"
        done = call("--compare", "--summary", str(path), *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.splitlines()[-1], "demo: ok")
        return json.loads(path.read_text())

    def expect_error(self, done, status: int, *parts: str) -> None:
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)


class Training(RowEncoderTest):
    def test_ranks_train_as_one_process_does(self) -> None:
        log = self.folder / "log.csv"
        summary = self.summary("--steps", "20", "--log", str(log))
        unsharded, one, two = summary["runs"]
        self.assertTrue(summary["ok"])
        self.assertEqual(
            [run["name"] for run in summary["runs"]],
            ["unsharded", "1 rank", "2 ranks"],
        )
        self.assertEqual(unsharded["losses"], one["losses"])
        for run in (one, two):
            for expected, actual in zip(unsharded["losses"], run["losses"]):
                self.assertLessEqual(abs(expected - actual), 1e-5 * expected)

        whole = unsharded["state_bytes_per_rank"]
        share = two["state_bytes_per_rank"]
        self.assertEqual(whole["gradients"], whole["parameters"])
        self.assertEqual(whole["optimizer"], 2 * whole["parameters"])
        for kind, size in whole.items():
            self.assertEqual(one["state_bytes_per_rank"][kind], size)
            self.assertGreaterEqual(share[kind], size / 2)
            self.assertLess(share[kind], 0.51 * size)
        self.assertAlmostEqual(summary["nearest_centroid_accuracy"], 0.9127, 4)

        with log.open() as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), 3 * 20)
        for step, rate in RATES.items():
            actual = float(rows[step - 1]["learning_rate"])
            self.assertTrue(math.isclose(actual, rate, rel_tol=1e-9), step)
        self.assertEqual(
            [float(row["loss"]) for row in rows if row["run"] == "2 ranks"],
            two["losses"],
        )

    def test_ranks_learn(self) -> None:
        path = self.folder / "summary.json"
        done = call(
            *["--steps", "60", "--batch", "24", "--lr", "0.01"],
            *["--layers", "1", "--summary", str(path)],
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (run,) = json.loads(path.read_text())["runs"]
        self.assertLess(sum(run["losses"][-5:]), 0.75 * sum(run["losses"][:5]))
        self.assertGreater(run["accuracy"], 0.4)

    def test_units_strategies_and_numbers_of_ranks(self) -> None:
        for arguments in (
            ["--ranks", "3", "--units", "model"],
            ["--ranks", "2", "--strategy", "no-shard"],
            ["--ranks", "4", "--strategy", "shard-grad-op"]
            + ["--units", "encoder.layers.*"],
        ):
            with self.subTest(arguments):
                ranks = int(arguments[1])
                run = self.summary("--steps", "2", *arguments)["runs"][-1]
                self.assertEqual(run["ranks"], ranks)
                share = run["state_bytes_per_rank"]["total"]
                total = run["state_bytes_of_all_ranks"]
                # All hold as much, but for the last, whose share is cut short.
                self.assertAlmostEqual(share / total, 1 / ranks, 2)

    def test_a_fault_is_the_last_line(self) -> None:
        done = call("--compare", "--steps", "1", "--min-accuracy", "1")
        self.assertEqual(done.returncode, 1)
        last = done.stdout.splitlines()[-1]
        self.assertTrue(last.startswith("demo: FAILED: accuracy of "), last)

    def test_an_error_is_the_last_line(self) -> None:
        done = call("--compare", "--steps", "1", "--units", "blocks.*")
        self.expect_error(done, 1, "blocks.*", "'encoder.layers.0'")
        last = done.stdout.splitlines()[-1]
        self.assertIn("demo: FAILED: fsdp: unit policy", last)


class Mistakes(RowEncoderTest):
    def test_usage(self) -> None:
        for arguments, parts in {
            ("--ranks", "0"): ["--ranks", "0 not in range"],
            ("--ranks", "5"): ["--batch 48", "--ranks 5", "Use 45 or 50"],
            ("--heads", "7"): ["--d-model 64", "--heads 7", "Use 63 or 70"],
            ("--batch", "2000"): ["--batch 2000", "1442"],
            ("--strategy", "zero"): ["--strategy", "full-shard", "no-shard"],
            ("--rnaks", "2"): ["--rnaks"],
            ("--log", "/dev/null/log"): ["--log", "/dev/null/log"],
        }.items():
            with self.subTest(arguments):
                self.expect_error(call(*arguments), 2, "--help", *parts)

    def test_full_disk(self) -> None:
        done = call("--steps", "1", "--summary", "/dev/full")
        self.expect_error(done, 1, "/dev/full", "could not be written")

    def test_missing_file(self) -> None:
        self.expect_error(call(data="no/such.csv"), 2, "--data", "no/such.csv")

    def test_wrong_table_is_named_with_its_line(self) -> None:
        for text, parts in {
            "": ["no rows"],
            "a line\n": [":1:", "separated by commas"],
            "1,2,3\n1,2,3\n1,2\n": [":3:", "2 fields", "line 1 has 3"],
            "1,2,3\n1,,3\n": [":2:", "field 2 is ''", "0 to 16"],
            "1,17,3\n": [":1:", "field 2 is '17'", "0 to 16"],
            "nan,2,3\n": [":1:", "field 1 is 'nan'"],
            "1,2,3.5\n": [":1:", "field 3 is '3.5'", "label from 0 to 9"],
        }.items():
            with self.subTest(text):
                self.expect_error(call(data=self.table(text)), 1, *parts)

    def test_too_few_rows(self) -> None:
        done = call("--batch", "2", data=self.table("1,2,3\r\n" * 4))
        self.expect_error(done, 2, "held-out rows, 0")

    def test_help_has_examples(self) -> None:
        done = call("--help")
        self.assertEqual(done.returncode, 0)
        self.assertIn("Examples:", done.stdout)
        self.assertIn("--d-model 512 --layers 12", done.stdout)


if __name__ == "__main__":
    PROGRAM, DIGITS = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1], verbosity=2)
