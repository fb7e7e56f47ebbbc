"""The Python half of common/token_pipe.h: answers the conductor."""

import json
import os
import sys
import time

# Libraries print what they like to stdout; the conductor reads answers only.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def _say(answer):
    print(json.dumps(answer), file=_answers, flush=True)


def serve(answer):
    """Says that this rank is ready, then sleeps in a blocking read until a token
    comes, hands its measure and count to `answer` and prints the result, until
    stdin ends."""
    _say({"ready": True})
    while line := sys.stdin.readline():
        words = line.split()
        if len(words) != 3 or words[0] != "run":
            raise ValueError(f"expected 'run MEASURE COUNT', but got {line!r}")
        _say(answer(words[1], int(words[2])))


def seconds_of(count, work):
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds}
