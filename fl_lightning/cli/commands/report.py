"""`fl-lightning report`: write runs as one HTML page."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.html_report.report import write_report
from fl_lightning.cli.commands.compare import reference_settings
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo
from fl_lightning.runs.search import open_runs


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Write the HTML report of some runs, and print which runs were left out and why."""
    if not given.out:
        raise ConfigError("-o: the name is empty. Name a file, such as report.html")
    out = Path(given.out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"-o: {out} does not end in .html. Name a file, such as report.html")
    runs = open_runs(given.runs, given.where)
    left_out = write_report(runs, out, reference=reference_settings(given.reference))
    for line in left_out:
        echo(f"left out: {line}")
    echo(f"wrote {out}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {out.stat().st_size / 1e6:.1f} MB")
    return 0
