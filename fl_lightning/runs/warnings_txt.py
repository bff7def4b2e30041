"""Record the warnings of a run in `warnings.txt`."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_lightning.core.errors import one_line
from fl_lightning.core.files import open_to_append, read_file, write_atomically


class WarningsTxt:
    """Context that records warnings in `warnings.txt`: a line `round <n>: <text>` for each warning.

    Warnings are also shown as usual. The file keeps the newest 1,000 to 2,000 warnings, each cut to 500 characters.
    Without warnings there is no file. Errors in writing the file are ignored.

    Args:
        path: The file.
        round: Returns the current round.
    """

    most, longest = 1000, 500

    def __init__(self, path: Path, round: Callable[[], int]) -> None:
        self.path, self.round = path, round
        self._lines: deque[bytes] = deque(maxlen=self.most)
        self._waiting: list[str] | None = None
        self._on_disk = 0

    def __enter__(self) -> WarningsTxt:
        self._shown = warnings.showwarning
        self._waiting = []  # the run folder is not locked yet
        warnings.showwarning = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        warnings.showwarning = self._shown

    @property
    def digest(self) -> str:
        """SHA-256 digest of all warnings before the current round."""
        return self._digest([line for line in self._lines if self._round_of(line) < self.round()])

    def check(self, round: int, digest: str) -> None:
        """Warn if the file of warnings has changed since the end of a round; results do not depend on this file.

        Args:
            round: The round.
            digest: The value of `digest` after that round.
        """
        lines = self._lines_until(round)
        if len(lines) < self.most and self._digest(lines) != digest:  # a longer file may have dropped old lines
            warnings.warn(f"{self.path} is not as it was after round {round}", stacklevel=2)

    def rewind(self, round: int) -> None:
        """Remove the warnings of rounds after `round` from the file.

        Then add the warnings that were raised before the run folder was locked, when the file could not be written.
        """
        waiting, self._waiting = self._waiting or [], None
        with suppress(OSError):
            before, kept = self._on_file(), self._lines_until(round)
            self._lines = deque([*kept, *map(self._line, waiting)], self.most)
            self._on_disk = len(before)
            if waiting or kept != before:
                self._rewrite()

    def _on_file(self) -> list[bytes]:
        return read_file(self.path).splitlines(keepends=True) if self.path.exists() else []

    def _lines_until(self, round: int) -> list[bytes]:
        return [line for line in self._on_file() if 0 <= self._round_of(line) <= round]

    @staticmethod
    def _round_of(line: bytes) -> int:
        """Return the round that a line of the file begins with; -1 for an incomplete line."""
        match = re.match(rb"round ([0-9]{1,18}): .*\n$", line)
        return int(match[1]) if match else -1

    @staticmethod
    def _digest(lines: Iterable[bytes]) -> str:
        return f"sha256:{hashlib.sha256(b''.join(lines)).hexdigest()}"

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        """Show a warning as before and add its line to the file, which has at most 2 * `most` lines at any time."""
        self._shown(message, *args, **kwargs)
        text = one_line(message)[: self.longest]
        if self._waiting is not None:
            self._waiting.append(text)
            return
        self._lines.append(line := self._line(text))
        with suppress(OSError):
            if self._on_disk >= 2 * self.most:
                self._rewrite()
            else:
                with open_to_append(self.path) as file:
                    file.write(line)
                self._on_disk += 1

    def _line(self, text: str) -> bytes:
        return f"round {self.round()}: {text}\n".encode(errors="replace")

    def _rewrite(self) -> None:
        if self._lines:
            write_atomically(self.path, b"".join(self._lines))
        else:
            self.path.unlink()
        self._on_disk = len(self._lines)
