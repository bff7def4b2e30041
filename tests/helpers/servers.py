"""A run's rounds as the server saw them, for methods whose server takes a step of its own."""

import torch
from experiments import experiment


def watched(run_dir, algorithm, **options):
    """Run an experiment; for each round the uploads, and the state that was made of them."""
    run = experiment(run_dir, algorithm, **options)
    rounds, aggregate = [], run.algorithm.aggregate

    def watch(state, uploads):
        uploads = list(uploads)
        rounds.append((state, uploads, aggregate(state, iter(uploads))))
        return rounds[-1][-1]

    run.algorithm.aggregate = watch
    run.fit()
    return run, rounds


def mean_of(uploads, weighting, section="model"):
    """The mean of the uploads, entry by entry, in float64; of integers the largest."""
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


def assert_near(state, expected, tolerance=1e-6):
    """Entries of a state against float64 ones."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name].double(), value.double(), rtol=tolerance, atol=tolerance)
