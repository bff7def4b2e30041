"""Checkpoints of rounds that are shorter than the disk needs to flush files."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from experiments import experiment
from fl_lightning.callbacks import Checkpointing, RoundCallback

from fl_lightning.runs import record


@pytest.fixture
def flushed(monkeypatch):
    """The names of the files that were flushed to disk."""
    names = []
    monkeypatch.setattr(os, "fsync", lambda handle: names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name))
    return names


def test_checkpoints_of_short_rounds_are_flushed_once_a_second_and_at_the_end(tmp_path, flushed, monkeypatch):
    now = iter(range(0, 10**6, 400))
    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: next(now) / 1000))
    run = experiment(tmp_path / "run", rounds=8)
    run.fit()
    assert run.checkpoints.rounds() == [8, 7]
    # round 0 at 0.0, until 1.4; round 3 at 1.6, until 3.0; round 7 at 3.2; round 8 at the end
    assert flushed.count("state.pt") == 4
    assert flushed.count("metrics.csv") >= 3
    last = len(flushed) - 1 - flushed[::-1].index("state.pt")
    assert flushed[last : last + 3] == ["state.pt", "manifest.json", "round-000008"]


def test_the_checkpoint_that_was_flushed_last_outlives_the_others(tmp_path, monkeypatch):
    seen = []

    class Watch(RoundCallback):
        def on_round_end(self, run, metrics):
            run.record.writer.wait()
            seen.append(run.checkpoints.rounds())

    monkeypatch.setattr(record, "FLUSH_SECONDS", 10**6)
    run = experiment(tmp_path / "run", rounds=5, callbacks=[Checkpointing(keep_last=1, monitor="global/loss"), Watch()])
    run.fit()
    assert all(0 in rounds for rounds in seen)
    assert 0 not in run.checkpoints.rounds()
    assert run.checkpoints.rounds()[0] == 5
