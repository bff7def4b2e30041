"""Read the files that W&B writes for a run."""

import json
import struct
import time
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024


def records(path: Path) -> list[Record]:
    """Return the records of a `.wandb` file: a LevelDB log after a header of seven bytes."""
    content = path.read_bytes()
    assert content.startswith(b":W&B")
    found, position, parts = [], 7, b""
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:  # what is left of a block is too small for a header
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(parts))
            parts = b""
    return found


def finished(path: Path) -> list[Record]:
    """Return the records of a finished run, whose last one W&B's own process writes a moment later."""
    deadline = time.monotonic() + 300
    while not of_kind(found := records(path), "exit"):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.02)
    return found


def of_kind(found, kind):
    """Return the records of a kind."""
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def values(items):
    """Return keys and values of a history, summary or config record; nested keys are joined by dots."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def summary_of(found):
    """Return the summary of a run."""
    found_values = {}
    for record in of_kind(found, "summary"):
        found_values |= values(record.update)
    return found_values


class Logged:
    """A run folder and its W&B files, oldest first."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.paths = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        self.parts = [finished(path) for path in self.paths]
        self.records = [record for part in self.parts for record in part]
