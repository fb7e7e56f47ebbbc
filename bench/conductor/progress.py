"""One line on the terminal that says what runs; some lines in a log."""

import sys
import time

LOG_EVERY_S = 10


class Progress:
    def __init__(self, stream=sys.stdout):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._width = 0
        self._last_log = -LOG_EVERY_S

    def say(self, text):
        """A line that stays."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def show(self, text):
        """A line that the next one replaces; in a log, one now and then."""
        if self._is_terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)
        elif time.monotonic() >= self._last_log + LOG_EVERY_S:
            self._last_log = time.monotonic()
            print(text, file=self._stream, flush=True)

    def _clear(self):
        if self._width > 0:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
