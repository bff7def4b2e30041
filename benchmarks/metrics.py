"""Compare the time of accuracy and loss as running sums (`evaluate`) with torchmetrics' classes.

    python benchmarks/metrics.py

There are two experiments: `digits_fedavg.yaml` as it is, and with 100 clients: 10 train per round and all are
evaluated. After each round, the global model is evaluated on the global test set and on each client's test split, in
both ways. The script prints medians, and how much longer a round would take with torchmetrics.
"""

import statistics
import time
import warnings

import torch
import torchmetrics
from torch.nn import functional as F

from fl_lightning.cli.experiment import build, experiment_parser
from fl_lightning.core.config_files import read_configs
from fl_lightning.core.task import Tasks
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.trainer import inference
from fl_lightning.evaluation.evaluation import evaluate

ROUNDS = 20
MANY = [
    "--scenario.clients=100",
    "--clients_per_round=10",
    "--scenario.partition=IID",
    "--evaluation.client_model=received",
]


def by_torchmetrics(module, batches, classes):
    """Return accuracy and mean cross-entropy, computed by torchmetrics."""
    accuracy = torchmetrics.classification.MulticlassAccuracy(classes, average="micro")
    loss = torchmetrics.MeanMetric()
    for x, y in batches:
        logits = module(x).detach().float()
        accuracy.update(logits, y)
        loss.update(F.cross_entropy(logits, y), weight=len(y))
    return float(accuracy.compute()), float(loss.compute())


def compare(*words):
    """Print the times of both ways on one experiment."""
    parser = experiment_parser()
    words = read_configs(["--config=digits_fedavg.yaml", "--logger", "null", *words]).words
    run = build(parser.parse_args(words), parser, "runs/unused")
    run._build()
    worker, classes = run.worker, run.data.data.num_classes
    data = worker.client_data
    tests = [data.ordered_batches(shard.test) for shard in run.data.shards if len(shard.test)] + [data.test_batches()]
    module = worker.modules.build()
    spent = {"round": [], "sums": [], "torchmetrics": []}
    for round in range(1, ROUNDS + 1):
        started = time.perf_counter()
        tasks = [
            run.server.task(round, client, run.server.download(round, client))
            for client in run.server.participants(round)
        ]
        clients = [task.client for task in tasks]
        run.engine.run(worker, Tasks(clients, tasks), ClientOrder(clients, lambda result: None))
        spent["round"].append(time.perf_counter() - started)
        with inference(module, worker.idle_trainer):
            for name, way in (
                ("sums", lambda batches: evaluate(module, batches)),
                ("torchmetrics", lambda batches: by_torchmetrics(module, batches, classes)),
            ):
                started = time.perf_counter()
                for batches in tests:
                    way(batches)
                spent[name].append(time.perf_counter() - started)
    fits, sums, other = (statistics.median(seconds) * 1e3 for seconds in spent.values())
    ways = f"by sums {sums:.1f} ms, by torchmetrics {other:.1f} ms: {(other - sums) / (fits + sums):+.1%} of a round"
    print(f"{len(run.server.participants(1))} fits {fits:.0f} ms; {len(tests)} evaluations {ways}")


def main():
    warnings.simplefilter("ignore")
    print(f"{torch.get_num_threads()} threads")
    compare()
    compare(*MANY)


if __name__ == "__main__":
    main()
