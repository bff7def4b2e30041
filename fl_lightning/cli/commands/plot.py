"""`fl-lightning plot`: draw runs as a figure for a paper."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.comparison import comparable_runs
from fl_lightning.analysis.figures import plot_runs
from fl_lightning.cli.commands.compare import grouping_keys
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import read_file, write_atomically
from fl_lightning.core.terminal import echo
from fl_lightning.runs.search import open_runs

MARK = "fl-lightning plot"
"""Text in the metadata of every figure that this command writes."""
METADATA: dict[str, dict[str, Any]] = {
    ".pdf": {"Creator": MARK, "CreationDate": None},
    ".svg": {"Creator": MARK, "Date": None},
    ".png": {"Software": MARK},
}
"""File metadata by file suffix. It has no date, so that the same runs give identical files."""
MOST_BYTES = 2**27
"""Maximum size in bytes of an existing file that may be replaced."""


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Draw a figure that compares groups of runs, write it to a file, and print lines for its caption."""
    path = Path(given.out)
    check_target(path)
    figure = plot_runs(
        comparable_runs(open_runs(given.runs, given.where), given.unfinished),
        kind=given.kind,
        x=given.x,
        y=given.y,
        by=grouping_keys(given.by),
        across=given.across,
        percent=given.percent,
        width=given.width,
        font=given.font,
        font_size=given.font_size,
        y_limits=given.y_limits,
    )
    figure.savefig(content := io.BytesIO(), format=path.suffix[1:], metadata=METADATA[path.suffix])
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise ConfigError(f"-o: {path} cannot be written: {one_line(error)}") from error
    width, height = figure.get_size_inches()
    echo("\n".join([f"wrote {path}: {width:.2f} x {height:.2f} inches", *figure.notes]))
    return 0


def check_target(path: Path) -> None:
    """Check a figure's path: the suffix is known, and an existing file there was written by this command.

    Raises:
        ConfigError: The suffix is unknown, or the file exists and was not written by this command.
    """
    if path.suffix not in METADATA:
        raise ConfigError(
            f"-o: {str(path)!r} does not end with {', '.join(METADATA)}. Name a file, such as figure.pdf."
        )
    try:
        ours = not path.exists() or MARK.encode() in read_file(path, MOST_BYTES, links=True)
    except OSError as error:
        raise ConfigError(f"-o: {path} cannot be replaced: {one_line(error)}") from error
    if not ours:
        raise ConfigError(f"-o: {path} exists and is not from `{MARK}`. Name another file, or remove it.")
