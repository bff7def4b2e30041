"""The console for tables and progress bars: rich's, without control characters from file contents and names."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from fl_lightning.core.terminal import printable


class SafeConsole(rich.console.Console):
    """A console of rich that prints only its own control characters. Those in texts are replaced, as by `echo`."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects. An error of the operating system names stdout, as that of `echo` does."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            error.filename = "stdout"
            raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object to segments of text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def table_console() -> SafeConsole:
    """Return a console for wide tables, which does not wrap their lines in a file."""
    return SafeConsole(width=None if sys.stdout.isatty() else 1000)
