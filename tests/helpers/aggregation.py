"""Aggregation of given uploads outside of a run."""

from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.core.round import Round


def aggregate(method, state, uploads, round=1):
    """Return the next shared state of a method."""
    aggregation = method.aggregation(Round(round, state))
    for upload in uploads:
        aggregation.add(upload)
    return aggregation.finish()


def finish(aggregator, uploads, before=None, knowledge=None):
    """Return an aggregator's part of the next shared state."""
    round = Round(1, {} if before is None else before)
    return aggregator.finish(fold_all(aggregator, uploads, round), round, {} if knowledge is None else knowledge)
