"""What accuracy and loss by torchmetrics' classes would cost in place of the sums that `evaluate` keeps.

    python benchmarks/metrics.py

A round of `digits_fedavg.yaml` is run again and again; in between, its evaluation (the global model, and each
participant on its own test split) is carried out in both ways, one after the other. Prints medians and the share of a
round that each is.
"""

import statistics
import time
import warnings

import torch
import torchmetrics
from torch.nn import functional as F

from fl_lightning.config import with_config_paths
from fl_lightning.evaluation import evaluate
from fl_lightning.experiment import build, experiment_parser

ROUNDS = 20


def by_torchmetrics(module, batches, classes):
    """Accuracy and mean cross-entropy as torchmetrics works them out."""
    accuracy = torchmetrics.classification.MulticlassAccuracy(classes, average="micro")
    loss = torchmetrics.MeanMetric()
    for x, y in batches:
        logits = module(x).detach().float()
        accuracy.update(logits, y)
        loss.update(F.cross_entropy(logits, y), weight=len(y))
    return float(accuracy.compute()), float(loss.compute())


def main():
    warnings.simplefilter("ignore")
    parser = experiment_parser()
    words = with_config_paths(["--config", "digits_fedavg.yaml", "--logger", "null"])
    run = build(parser.parse_args(words), parser, "runs/unused")
    run._build()
    worker, classes = run.worker, run.data.data.num_classes
    tests = [worker._ordered(shard.test) for shard in run.data.shards] + [worker.test_batches()]
    module = worker.module()
    spent = {"round": [], "sums": [], "torchmetrics": []}
    for round in range(1, ROUNDS + 1):
        started = time.perf_counter()
        tasks = [run._task(round, client, run.download(round, client)) for client in run.participants(round)]
        list(run.engine.run(worker, iter(tasks)))
        spent["round"].append(time.perf_counter() - started)
        with worker.inference(module):
            for name, way in (
                ("sums", lambda batches: evaluate(module, batches)),
                ("torchmetrics", lambda batches: by_torchmetrics(module, batches, classes)),
            ):
                started = time.perf_counter()
                for batches in tests:
                    way(batches)
                spent[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
    fit = medians["round"]
    print(f"a round's fits and its evaluation as it is: {fit * 1e3:.0f} ms, {torch.get_num_threads()} threads")
    for name in ("sums", "torchmetrics"):
        print(f"accuracy and loss by {name}: {medians[name] * 1e3:.1f} ms")
    print(f"torchmetrics costs {(medians['torchmetrics'] - medians['sums']) / fit:+.1%} of a round")


if __name__ == "__main__":
    main()
