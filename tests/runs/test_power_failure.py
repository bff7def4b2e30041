"""After a power failure, only what was flushed to disk remains."""

import os
from pathlib import Path

from experiments import experiment

from fl_lightning.callbacks import Checkpointing


def test_every_checkpoint_is_flushed_after_the_rows_that_it_counts(tmp_path, monkeypatch):
    flushed = []

    def flush(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "metrics.csv":
            flushed.append(len(path.read_text().splitlines()[1:]))
        elif path.name == "state.pt":
            flushed.append("checkpoint")

    monkeypatch.setattr(os, "fsync", flush)
    experiment(tmp_path / "run", rounds=3, callbacks=[Checkpointing(every=1)]).fit()
    assert flushed == ["checkpoint", 1, "checkpoint", 2, "checkpoint", 3, "checkpoint"]
