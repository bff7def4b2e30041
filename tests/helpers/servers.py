"""Rounds of a run as its server sees them."""

import torch
from experiments import experiment, record_rounds


def watched(run_dir, algorithm, **options):
    """Run an experiment. Also return the state before, the uploads and the state after of each round."""
    run = experiment(run_dir, algorithm, **options)
    rounds = record_rounds(run)
    run.fit()
    return run, rounds


def mean_of(uploads, weighting, section="model"):
    """Return the mean of the uploads of each entry in float64, or the largest of integers."""
    shares = torch.tensor([u.n_samples if weighting == "samples" else 1 for u in uploads], dtype=torch.float64)
    shares /= shares.sum()
    stacked = {
        name: torch.stack([u.message.section(section)[name] for u in uploads])
        for name in uploads[0].message.section(section)
    }
    return {
        name: torch.tensordot(shares, value.double(), dims=1) if value.is_floating_point() else value.amax(dim=0)
        for name, value in stacked.items()
    }
