"""LoRA on a BERT of 20 million parameters: fl-lightning beside a hand-written peft loop, and the cost of a client.

    pip install -e '.[transformers]'
    python benchmarks/adapters.py --turns 3

The network has random weights, so nothing is downloaded. In each turn, the loop and fl-lightning train the same clients
for the same rounds, one after the other. The script prints the ratio of their times, the largest difference of their
adapters, the milliseconds until a client's module is ready to train, and what a deep copy of the network would take. It
also prints how many bytes a client receives and sends, and the size of a checkpoint and of the final model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, logging

from fl_lightning import IID, Arrays, Evaluation, FedAvg, FederatedOrchestrator, LocalTraining, Scenario
from fl_lightning.core.seeding import Stream, derive

CLIENTS, SAMPLES, LENGTH, WORDS, BATCH, LR = 8, 24, 32, 1000, 8, 0.01


class Bert(nn.Module):
    """A BERT with LoRA on queries and values, for texts of two classes.

    Args:
        in_shape: Shape of an input.
        num_classes: Number of classes.
        layers: Number of layers.
        width: Size of the hidden states.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, layers: int = 6, width: int = 512) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            intermediate_size=4 * width,
            num_labels=num_classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        self.net = get_peft_model(BertForSequenceClassification(config), lora)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(B, C)` of token ids `(B, length)`."""
        return self.net(input_ids=x).logits


def write_data(folder: Path) -> Arrays:
    """Write random texts of two classes, and return them as a dataset."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", CLIENTS * SAMPLES), ("test", 32)):
        arrays[f"x_{split}"] = rng.integers(WORDS, size=(n, LENGTH))
        arrays[f"y_{split}"] = rng.integers(2, size=n)
    np.savez(folder / "texts.npz", **arrays)
    return Arrays(str(folder / "texts.npz"))


def new_run(data: Arrays, run_dir: Path, rounds: int, model: Any) -> FederatedOrchestrator:
    """Return an experiment with all clients in each round."""
    training = LocalTraining(
        trainer={"max_epochs": 1, "accelerator": "cpu"}, batch_size=BATCH, optimizer=partial(torch.optim.SGD, lr=LR)
    )
    return FederatedOrchestrator(
        Scenario(data, IID(), CLIENTS),
        model,
        FedAvg(),
        rounds=rounds,
        run_dir=run_dir,
        training=training,
        evaluation=Evaluation(every=rounds),
        callbacks=[],
        engine="sequential",
    )


def batches_of(run: FederatedOrchestrator, client: int, round: int) -> list[tuple[Tensor, Tensor]]:
    """Return a client's batches in a round, as docs/design.md says that they are drawn."""
    generator = torch.Generator().manual_seed(derive(run.seed, Stream.BATCHES, round, client))
    indices = run.data.shards[client].train
    order = indices[torch.randperm(len(indices), generator=generator)]
    return [(run.data.data.x_train[rows], run.data.data.y_train[rows]) for rows in order.split(BATCH)]


def loop(run: FederatedOrchestrator, network: nn.Module, rounds: int) -> dict[str, Tensor]:
    """Train as a hand-written loop of peft does: one network, and copies of what trains. Return the mean of it."""
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    shared = {name: p.detach().clone() for name, p in trained.items()}
    sizes = [len(shard.train) for shard in run.data.shards]
    network.train()
    for round in range(1, rounds + 1):
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in shared.items()}
        for client, size in enumerate(sizes):
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(shared[name])
            optimizer = torch.optim.SGD(trained.values(), lr=LR)
            for x, y in batches_of(run, client, round):
                optimizer.zero_grad()
                F.cross_entropy(network(x), y).backward()
                optimizer.step()
            for name, parameter in trained.items():
                sums[name] += size * parameter.detach().double()
        shared = {name: (value / sum(sizes)).to(shared[name].dtype) for name, value in sums.items()}
    return shared


def milliseconds(action: Any, times: int = 10) -> float:
    """Return the median time of an action in milliseconds."""
    durations = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        durations.append(1e3 * (time.perf_counter() - started))
    return statistics.median(durations)


def main() -> None:
    """Run the contestants in turns, and print ratios and sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    logging.set_verbosity_error()
    model = partial(Bert, layers=given.layers, width=given.width)
    ratios, difference = [], 0.0
    for turn in range(given.turns):
        with tempfile.TemporaryDirectory() as folder:
            run = new_run(write_data(Path(folder)), Path(folder) / "run", given.rounds, model)
            run.check()
            network = copy.deepcopy(run.worker.template.backbone)
            started = time.perf_counter()
            expected = loop(run, network, given.rounds)
            by_hand = time.perf_counter() - started
            run.fit()
            ours = sum(row["time/fit_s"] for row in run.csv.rows)  # the loop does not evaluate
            ratios.append(ours / by_hand)
            model_state = run.state["model"]
            difference = max(float((model_state[name] - value).abs().max()) for name, value in expected.items())
            print(f"turn {turn + 1}: loop {by_hand:.2f} s, fl-lightning {ours:.2f} s, ratio {ratios[-1]:.3f}")
            if turn == given.turns - 1:
                print(f"median ratio {statistics.median(ratios):.3f}; largest difference {difference:.1e}")
                describe(run, Path(folder) / "run")


def describe(run: FederatedOrchestrator, run_dir: Path) -> None:
    """Print what a client costs beyond its training, and the sizes of what is sent and stored."""
    modules, server = run.worker.modules, run.server
    slot = modules.new_slot()
    task = server.task(1, 0, server.download(1, 0))
    parameters = list(run.worker.template.backbone.parameters())
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    print(f"{total:,} parameters, {sum(p.numel() for p in parameters if p.requires_grad):,} of them trained")
    print(f"deep copy of the network: {milliseconds(lambda: copy.deepcopy(run.worker.template.backbone)):.1f} ms")
    print(f"client ready to train: {milliseconds(lambda: modules.receive(task, slot)):.2f} ms")
    print(f"client ready to train, without a reusable module: {milliseconds(lambda: modules.receive(task)):.2f} ms")
    upload = run.worker.run(task).upload
    assert upload
    print(f"trained {trained:,} bytes; download {task.download.nbytes:,}, upload {upload.nbytes:,}")
    for name in ("checkpoints", "final"):
        files = [path for path in (run_dir / name).rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        print(f"{largest.relative_to(run_dir)}: {largest.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
