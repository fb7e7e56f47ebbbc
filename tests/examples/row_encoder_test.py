#!/usr/bin/env python3
"""Runs the row encoder for a few steps, alone and on several ranks, and checks
what it prints and writes.

usage: row_encoder_test.py BUILD_FOLDER
"""

import csv
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path()
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


def run(command: list, backend: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ, LIBFSDP_BACKEND=backend, LIBFSDP_TIMEOUT="30"),
    )


def program(*arguments: str, data: str = "") -> list:
    data = data or str(BUILD / "data/digits.csv")
    return [str(BUILD / "bin/row_encoder"), "--data", data, *arguments]


def on_ranks(ranks: int, command: list) -> list:
    launcher = [str(BUILD / "bin/fsdp"), "run", "-n", str(ranks), "--no-prefix"]
    return launcher + ["--", *command]


def call(*arguments: str, data: str = "") -> subprocess.CompletedProcess:
    """The program alone, which is one rank."""
    return run(program(*arguments, data=data))


class RowEncoderTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def table(self, text: str) -> str:
        path = self.folder / "table.csv"
        path.write_text(text)
        return str(path)

    def compare(self, ranks: int, *arguments: str, backend: str = "") -> dict:
        path = self.folder / "new folder" / "summary.json"
        command = program("--compare", "--summary", str(path), *arguments)
        if ranks > 1:
            command = on_ranks(ranks, command)
        done = run(command, backend)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(path.read_text())

    def expect_error(self, done, status: int, *parts: str) -> None:
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)


class Training(RowEncoderTest):
    def test_ranks_train_as_one_process_does(self) -> None:
        log = self.folder / "log.csv"
        summary = self.compare(2, "--steps", "20", "--log", str(log))
        unsharded, one, two = summary["runs"]
        self.assertTrue(summary["ok"])
        self.assertEqual(summary["settings"]["ranks"], 2)
        self.assertEqual(
            [run["name"] for run in summary["runs"]],
            ["unsharded", "1 rank", "2 ranks"],
        )
        self.assertEqual(unsharded["losses"], one["losses"])
        for expected, actual in zip(unsharded["losses"], two["losses"]):
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

    def test_back_ends_train_alike(self) -> None:
        arguments = ["--steps", "3"]
        shm = self.compare(2, *arguments, backend="shm")["runs"][-1]
        gloo = self.compare(2, *arguments, backend="gloo")["runs"][-1]
        self.assertEqual(gloo["losses"], shm["losses"])
        self.assertEqual(
            gloo["state_bytes_per_rank"], shm["state_bytes_per_rank"]
        )
        # Ranks with shared memory read one another's weights where they are.
        self.assertGreater(gloo["peak_gathered_bytes"], 0)
        self.assertEqual(shm["peak_gathered_bytes"], 0)

    def test_a_program_started_alone_is_one_rank(self) -> None:
        summary = self.compare(1, "--steps", "2")
        self.assertEqual(
            [run["name"] for run in summary["runs"]], ["unsharded", "1 rank"]
        )

    def test_ranks_learn(self) -> None:
        path = self.folder / "summary.json"
        arguments = ["--steps", "60", "--batch", "24", "--lr", "0.01"]
        arguments += ["--layers", "1", "--summary", str(path)]
        done = run(on_ranks(2, program(*arguments)))
        self.assertEqual(done.returncode, 0, done.stderr)
        (training,) = json.loads(path.read_text())["runs"]
        losses = training["losses"]
        self.assertLess(sum(losses[-5:]), 0.75 * sum(losses[:5]))
        self.assertGreater(training["accuracy"], 0.4)

    def test_only_rank_0_prints(self) -> None:
        done = run(on_ranks(2, program("--steps", "1")))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("model: "), 1)
        self.assertEqual(done.stderr, "")

    def test_units_strategies_and_numbers_of_ranks(self) -> None:
        for ranks, backend, arguments in (
            (3, "shm", ["--units", "model"]),
            (3, "gloo", ["--strategy", "shard-grad-op"]),
            (2, "shm", ["--strategy", "no-shard"]),
            (3, "shm", ["--units", "encoder.layers.*"]),
        ):
            with self.subTest(ranks=ranks, backend=backend, arguments=arguments):
                summary = self.compare(
                    ranks, "--steps", "2", *arguments, backend=backend
                )
                training = summary["runs"][-1]
                self.assertEqual(training["ranks"], ranks)
                share = training["state_bytes_per_rank"]["total"]
                total = training["state_bytes_of_all_ranks"]
                # All hold as much, but for the last, whose share is cut short.
                self.assertAlmostEqual(share / total, 1 / ranks, 2)

    def test_a_fault_is_an_error(self) -> None:
        path = self.folder / "summary.json"
        arguments = ["--compare", "--steps", "1", "--min-accuracy", "1"]
        arguments += ["--summary", str(path)]
        done = run(on_ranks(2, program(*arguments)))
        self.expect_error(done, 1, "row_encoder: accuracy of unsharded is")
        summary = json.loads(path.read_text())
        self.assertFalse(summary["ok"])
        self.assertEqual(len(summary["faults"]), 3)


class Demo(RowEncoderTest):
    """The script that `make demo` runs once all is built."""

    def demo(
        self, *arguments: str, build: pathlib.Path | None = None
    ) -> subprocess.CompletedProcess:
        script = str(ROOT / "scripts/run_demo.sh")
        return run([script, str(build or BUILD), str(self.folder), *arguments])

    def build_whose_rank_dies(self, rank: int) -> pathlib.Path:
        """A build folder: `rank` is killed while rank 0 trains alone, when the
        first steps are in the log."""
        (self.folder / "losses.csv").unlink(missing_ok=True)
        build = self.folder / f"rank {rank} dies"
        (build / "bin").mkdir(parents=True)
        (build / "data").symlink_to(BUILD / "data")
        (build / "bin/fsdp").symlink_to(BUILD / "bin/fsdp")
        program = build / "bin/row_encoder"
        program.write_text(
            "#!/bin/sh\n"
            f"real='{BUILD}/bin/row_encoder'\n"
            f'if [ "$RANK" != {rank} ]; then exec "$real" "$@"; fi\n'
            '"$real" "$@" &\n'
            f"until [ -s '{self.folder}/losses.csv' ]; do sleep 0.05; done\n"
            "kill -KILL $!\n"
            "wait $!\n"
        )
        program.chmod(0o755)
        return build

    def expect_last_line(self, done, status: int, *parts: str) -> None:
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        last = done.stdout.splitlines()[-1]
        for part in parts:
            self.assertIn(part, last)

    def test_success(self) -> None:
        done = self.demo("--min-accuracy", "0", "--steps", "2")
        self.expect_last_line(done, 0, "demo: ok")
        self.assertIn("started by fsdp run; back end shm", done.stderr)
        summary = json.loads((self.folder / "summary.json").read_text())
        self.assertEqual(summary["runs"][-1]["name"], "2 ranks")

    def test_fault(self) -> None:
        done = self.demo("--steps", "1")
        self.expect_last_line(done, 1, "demo: FAILED: accuracy of unsharded is ")

    def test_error_of_all_ranks(self) -> None:
        done = self.demo("--steps", "1", "--units", "blocks.*")
        parts = ["demo: FAILED: fsdp: unit policy", "blocks.*"]
        self.expect_last_line(done, 1, *parts)

    def test_wrong_usage(self) -> None:
        # Of another run; it has nothing to do with this one.
        (self.folder / "summary.json").write_text('{"faults": ["old"]}')
        done = self.demo("--rnaks", "2")
        self.assertIn("--rnaks", done.stderr)
        self.expect_last_line(
            done, 1, "demo: FAILED: row_encoder ended with status 2"
        )

    def test_rank_that_is_killed(self) -> None:
        for rank, why in {
            0: "row_encoder ended with status 137",
            # Of rank 0, unless the machine is too busy for it to tell in time.
            1: "(barrier .*rank 0/2.* rank 1|row_encoder ended with)",
        }.items():
            with self.subTest(rank):
                build = self.build_whose_rank_dies(rank)
                small = ["--layers", "1", "--batch", "2", "--steps", "1000000"]
                done = self.demo(*small, build=build)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                last = done.stdout.splitlines()[-1]
                self.assertRegex(last, "^demo: FAILED: " + why)


class RanksThatFail(RowEncoderTest):
    def start(self, rank: int, *arguments: str, data: str = "") -> subprocess.Popen:
        """Rank `rank` of two, without a launcher, which would end the other."""
        process = subprocess.Popen(
            program(*arguments, data=data),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE="2",
                LIBFSDP_JOB=str(self.folder),
                LIBFSDP_TIMEOUT="30",
            ),
        )
        self.addCleanup(process.kill)
        return process

    def test_an_error_on_one_rank_ends_the_other(self) -> None:
        summary = self.folder / "summary.json"
        table = self.table("1,2,3\n1,2\n")
        ranks = [self.start(0, "--summary", str(summary)), self.start(1, data=table)]
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [1, 1], errors)
        self.assertIn(f"row_encoder: rank 1/2: {table}:2: 2 fields", errors[1])
        why = "rank 0/2 waits for rank 1, gone"
        self.assertIn("row_encoder: rank 0/2: ", errors[0])
        self.assertIn(why, errors[0])
        self.assertIn(why, json.loads(summary.read_text())["faults"][0])


class Mistakes(RowEncoderTest):
    def test_usage(self) -> None:
        for arguments, parts in {
            ("--steps", "0"): ["--steps", "0 not in range"],
            ("--heads", "7"): ["--d-model 64", "--heads 7", "Use 63 or 70"],
            ("--batch", "2000"): ["--batch 2000", "1442"],
            ("--strategy", "zero"): ["--strategy", "full-shard", "no-shard"],
            ("--rnaks", "2"): ["--rnaks"],
            ("--log", "/dev/null/log"): ["--log", "/dev/null/log"],
        }.items():
            with self.subTest(arguments):
                self.expect_error(call(*arguments), 2, "--help", *parts)

    def test_batch_that_ranks_cannot_divide(self) -> None:
        done = run(on_ranks(2, program("--batch", "47")))
        parts = ["--batch 47", "number of ranks, 2", "Use 46 or 48"]
        self.expect_error(done, 2, "row_encoder: rank 0/2: ", *parts)

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
    BUILD = pathlib.Path(sys.argv[1]).resolve()
    unittest.main(argv=sys.argv[:1], verbosity=2)
