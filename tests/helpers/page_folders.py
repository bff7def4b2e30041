"""Run folders written by hand, as `fit` leaves them: a test that only reads runs need not run any."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

Table = Mapping[str, Sequence[Any]]


def write_run(folder: Path, config: Mapping[str, Any], metrics: Table, clients: Table | None = None) -> Path:
    """A run of this config; of the metrics, None stands for a blank. Columns `round` from 1 where there are none."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    rounds = range(1, len(next(iter(metrics.values()))) + 1)
    (folder / "metrics.csv").write_text(as_csv({"round": rounds, **metrics}))
    if clients:
        (folder / "clients.csv").write_text(as_csv(clients))
    return folder


def as_csv(columns: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def write_counts(folder: Path, counts: np.ndarray) -> None:
    """A run's partition.csv; its test splits hold as much."""
    lines = [["client", "split", *(f"class_{j}" for j in range(counts.shape[1]))]]
    lines += [[k, split, *row] for split in ("train", "test") for k, row in enumerate(counts.tolist())]
    (folder / "partition.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


def write_picture(path: Path, pixels: np.ndarray) -> None:
    """A picture of `(height, width, 3)` bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
