"""Federated language models: against a loop over single sentences, with trimmed batches, on every engine."""

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import assert_near, experiment, local_batches, same_bytes
from methods import assert_same_run
from peers import mean_by_hand
from refusals import refusal
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms import IFCA, MOON, FedALA, FedBABU, PerFedAvg
from fl_lightning.algorithms.personalized.perfedavg import adapt
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import mean_loss
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import CausalLM, TokenClassification
from fl_lightning.data import (
    IID,
    Arrays,
    ByClient,
    Dataset,
    Dirichlet,
    InstructionFile,
    LoadedData,
    Scenario,
    TextFile,
    TextTable,
)
from fl_lightning.engines import ProcessesEngine, StackedEngine
from fl_lightning.engines.client_data import ClientData
from fl_lightning.models import CausalTransformer, classification_layer

SITES = {"north": "a b a c", "south": "b b c", "west": "c a"}
MODEL = partial(CausalTransformer, width=8, depth=1, heads=2)
SEEN: list[tuple[int, ...]] = []


class Watched(CausalTransformer):
    """Records the shapes of the token ids that it is called with."""

    def features_and_logits(self, x: Any) -> tuple[Tensor, Tensor]:
        SEEN.append(tuple(x.tensors["input_ids"].shape))
        return super().features_and_logits(x)


def write_sites(folder: Path, lines: int = 12) -> str:
    """Write one file per site, with sentences of 1 to 7 times its words."""
    folder.mkdir(exist_ok=True)
    for site, words in SITES.items():
        text = "\n".join(" ".join([words] * (1 + 3 * i % 7)) for i in range(lines))
        (folder / f"{site}.txt").write_text(text)
    return str(folder)


def language_run(tmp_path: Path, algorithm: Any = None, name: str = "run", **options: Any) -> Any:
    dataset = TextFile(write_sites(tmp_path / "texts"), length=40)
    settings = {
        "scenario": Scenario(dataset, ByClient()),
        "model": MODEL,
        "rounds": 2,
        "clients_per_round": 3,
        "batch_size": 4,
        "optimizer": partial(torch.optim.SGD, lr=0.2),
    }
    return experiment(tmp_path / name, algorithm, **settings | options)


def sentences(x: Inputs) -> list[Tensor]:
    """Return the token ids of each text, without padding."""
    ids, mask = x.tensors["input_ids"], x.tensors["attention_mask"]
    return [row[kept != 0] for row, kept in zip(ids, mask, strict=True)]


def losses_of(network: nn.Module, texts: list[Tensor]) -> Tensor:
    """Return the loss of each predicted token of unpadded sentences, which are computed one by one."""
    losses = []
    for text in texts:
        logits = network(text[None])[0]
        losses += [-F.log_softmax(logits[i], dim=0)[text[i + 1]] for i in range(len(text) - 1)]
    return torch.stack(losses)


@pytest.mark.numeric
@pytest.mark.usefixtures("float64")
def test_fedavg_equals_a_loop_over_single_tokens(tmp_path: Path) -> None:
    run = language_run(tmp_path)
    run.fit()
    model = copy.deepcopy(run.worker.template.backbone).train()
    for round in (1, 2):
        ends = []
        for client in range(3):
            local = copy.deepcopy(model)
            for epoch in local_batches(run, round, client):
                for x, _ in epoch:
                    gradients = torch.autograd.grad(losses_of(local, sentences(x)).mean(), list(local.parameters()))
                    with torch.no_grad():
                        for parameter, gradient in zip(local.parameters(), gradients, strict=True):
                            parameter -= 0.2 * gradient
            ends.append(local.state_dict())
        sizes = [len(run.data.shards[client].train) for client in range(3)]
        model.load_state_dict(mean_by_hand(ends, sizes))
    assert_near(run.state["model"], model.state_dict(), 1e-12)
    last = run.csv.rows[-1]
    losses = losses_of(model, sentences(run.data.data.x_test)).detach()
    assert float(last["global/perplexity"]) == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    assert float(last["global/loss"]) == pytest.approx(float(losses.mean()), rel=1e-6)


def test_the_perplexity_of_each_client_is_that_of_its_own_sentences(tmp_path: Path) -> None:
    run = language_run(tmp_path)
    run.fit()
    metrics = run.evaluator.test(2)
    network = run.worker.modules.build_shared(run.state["model"]).backbone
    for client in range(3):
        own = run.data.data.x_train[run.data.shards[client].test]
        perplexity = float(losses_of(network, sentences(own)).detach().mean().exp())
        assert metrics.clients[client]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    values = [metrics.clients[client]["perplexity"] for client in range(3)]
    assert metrics["client/perplexity_mean"] == pytest.approx(sum(values) / 3)
    assert metrics["client/perplexity_worst_decile"] == pytest.approx(max(values))


def test_results_do_not_depend_on_trimming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = partial(Watched, width=8, depth=1, heads=2)
    SEEN.clear()
    trimmed = language_run(tmp_path, name="trimmed", model=model)
    trimmed.fit()
    widths = {shape[1] for shape in SEEN}
    assert len(widths) > 3
    assert max(widths) < 40
    SEEN.clear()
    monkeypatch.setattr(Inputs, "lengths", None)
    padded = language_run(tmp_path, name="padded", model=model)
    padded.fit()
    assert {shape[1] for shape in SEEN} == {40}
    assert_near(trimmed.state["model"], padded.state["model"], 1e-5)
    for name in ("global/loss", "global/perplexity", "client/acc_mean", "client/train_loss"):
        assert float(trimmed.csv.rows[-1][name]) == pytest.approx(float(padded.csv.rows[-1][name]), rel=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_processes_have_the_same_bytes(tmp_path: Path) -> None:
    one = language_run(tmp_path, name="one")
    one.fit()
    other = language_run(tmp_path, name="other", engine=ProcessesEngine(workers=2))
    other.fit()
    assert_same_run(one, other)


def test_a_resumed_run_has_the_same_bytes(tmp_path: Path) -> None:
    whole = language_run(tmp_path, name="whole")
    whole.fit()
    language_run(tmp_path, name="parts", rounds=1).fit()
    resumed = language_run(tmp_path, name="parts")
    resumed.fit(resume=True)
    assert same_bytes(whole.state["model"], resumed.state["model"])


def test_stacked_clients_are_refused_in_one_line(tmp_path: Path) -> None:
    assert refusal(language_run(tmp_path, engine=StackedEngine()).fit).startswith("engine")


class TwoPositions(nn.Module):
    """A network of token ids with positions for two tokens only."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(num_classes, num_classes), nn.Embedding(2, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))


def test_too_few_positions_are_refused_with_the_length_of_the_texts(tmp_path: Path) -> None:
    message = refusal(lambda: language_run(tmp_path, model=TwoPositions).fit())
    assert message.startswith("model: ")
    data = TextFile(write_sites(tmp_path / "again"), length=40).load()
    texts = [text for x in (data.x_train, data.x_test) for text in sentences(x)]
    assert f"{max(map(len, texts))} positions" in message


class IdsAlone(Dataset):
    """Token ids as the only input, and their labels. They are not trimmed."""

    objective = CausalLM()

    def __init__(self, path: str) -> None:
        self.path = path

    def load(self) -> LoadedData:
        data = TextFile(self.path, length=40).load()
        x_train, x_test = (x.tensors["input_ids"] for x in (data.x_train, data.x_test))
        return replace(data, x_train=x_train, x_test=x_test)


class Bigrams(nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_classes, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


@pytest.mark.numeric
def test_stacked_clients_train_on_token_ids_alone(tmp_path: Path) -> None:
    scenario = Scenario(IdsAlone(write_sites(tmp_path / "texts")), ByClient())
    one, other = (
        language_run(tmp_path, name=engine, scenario=scenario, model=Bigrams, engine=engine)
        for engine in ("sequential", "stacked")
    )
    one.fit()
    other.fit()
    assert_near(one.state["model"], other.state["model"], 1e-5)


@pytest.mark.parametrize("algorithm", [FedALA(), FedBABU(tune_epochs=1), PerFedAvg(), IFCA(clusters=2)])
def test_methods_that_use_all_batches_of_a_client_work(
    algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientData, "eval_batch_size", 2)  # batches of several lengths
    run = language_run(tmp_path, algorithm, trainer={"accelerator": "cpu", "max_epochs": 2})
    run.fit()
    assert math.isfinite(float(run.csv.rows[-1]["client/perplexity_mean"]))


def test_ifca_and_perfedavg_average_over_all_tokens_of_a_client() -> None:
    texts = [torch.randint(0, 5, (length,)) for length in (6, 2, 3)]
    batches = [(text[None], text[None]) for text in texts]
    module = ClientModule(Bigrams(5), objective=CausalLM())
    before = module.backbone.table.weight.detach().clone()
    loss = losses_of(module.backbone, texts).mean()
    (gradient,) = torch.autograd.grad(loss, module.backbone.table.weight)
    with torch.no_grad():
        torch.testing.assert_close(mean_loss(module, batches).float(), loss.detach())
    adapt(module, batches, alpha=0.3)
    torch.testing.assert_close(module.backbone.table.weight.detach(), before - 0.3 * gradient)


def test_a_method_that_compares_feature_vectors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="model: ModelContrast "):
        language_run(tmp_path, MOON()).fit()


def test_instructions_are_split_by_their_client_field(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "say {who}", "response": "{who}", "who": "{who}"}}' for who in ("a", "b") for _ in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    scenario = Scenario(InstructionFile(str(tmp_path / "a.jsonl"), client="who", length=20), ByClient())
    run = language_run(tmp_path, scenario=scenario, clients_per_round=2)
    run.fit()
    assert run.data.names.clients == ["a", "b"]
    first, last = (float(run.csv.rows[row]["global/perplexity"]) for row in (0, -1))
    assert last < first


class MeanOfTokens(nn.Module):
    """A text classifier whose output is the mean over tokens, for which the mask matters."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 8), nn.Linear(8, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.unsqueeze(2)
        return self.head((self.embed(input_ids) * kept).sum(dim=1) / kept.sum(dim=1))


def test_tokenized_texts_are_classified_on_a_partition_by_class(tmp_path: Path) -> None:
    rows = "\n".join(f"{'good' if i % 2 else 'bad'} {'film ' * (i % 5)},{i % 2}" for i in range(60))
    (tmp_path / "t.csv").write_text(f"text,label\n{rows}\n")
    dataset = TextTable(str(tmp_path / "t.csv"), tokenizer="bytes", length=40)
    scenario = Scenario(dataset, Dirichlet(1.0, min_samples=5), 3)
    run = language_run(tmp_path, scenario=scenario, model=MeanOfTokens, rounds=5, optimizer=torch.optim.Adam)
    run.fit()
    assert float(run.csv.rows[-1]["global/loss"]) < float(run.csv.rows[0]["global/loss"])


class Tagger(nn.Module):
    """Predicts a class for each token from the token alone."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(20, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.table(input_ids)


def test_classes_of_tokens_are_learned_from_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids, lengths = rng.integers(1, 20, (80, 9)), rng.integers(1, 10, (80, 1))
    mask = (np.arange(9) < lengths).astype(np.int64)
    labels = np.where(mask, ids % 3, -100)
    arrays = {}
    for split, rows in (("train", slice(60)), ("test", slice(60, None))):
        arrays |= {f"x_{split}_input_ids": (ids * mask)[rows], f"x_{split}_attention_mask": mask[rows]}
        arrays[f"y_{split}"] = labels[rows]
    np.savez(tmp_path / "tags.npz", **arrays)
    dataset = Arrays(str(tmp_path / "tags.npz"), num_classes=3)
    scenario = Scenario(dataset, IID(), 3, objective=TokenClassification())
    optimizer = partial(torch.optim.Adam, lr=0.1)
    run = language_run(tmp_path, scenario=scenario, model=Tagger, rounds=5, optimizer=optimizer)
    run.fit()
    assert float(run.csv.rows[-1]["global/acc"]) == 1
    assert refusal(lambda: Scenario(dataset, IID(), 3).build(0)).startswith("scenario.dataset")


def test_batches_for_evaluation_are_smaller_if_their_outputs_are_large(tmp_path: Path) -> None:
    run = language_run(tmp_path)
    run.load()
    assert run.worker.client_data.eval_batch_size == 128
    large = copy.copy(run.worker.client_data)
    large.data = copy.copy(large.data)
    large.data.data = copy.copy(large.data.data)
    large.data.data.num_classes = 2**20
    assert isinstance(large, ClientData)
    assert isinstance(large.data.data, LoadedData)
    vars(large).pop("eval_batch_size", None)
    assert large.eval_batch_size == 2**28 // 2**20 // 40


# --- The network ---


def test_outputs_do_not_depend_on_later_tokens_or_padding() -> None:
    network = CausalTransformer((9,), 11, width=16, depth=2, heads=4).eval()
    ids = torch.randint(0, 11, (2, 9))
    outputs = network(ids)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    torch.testing.assert_close(network(changed)[:, :5], outputs[:, :5])
    assert not torch.allclose(network(changed)[:, 5:], outputs[:, 5:])
    torch.testing.assert_close(network(ids[:, :4]), outputs[:, :4])
    assert classification_layer(network).out_features == 11


def test_attention_equals_a_loop_over_positions_and_heads() -> None:
    layer = CausalTransformer((5,), 3, width=8, depth=1, heads=2).double().encoder.layers[0]
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    queries, keys, values = layer.queries_keys_values(x)[0].split(8, dim=1)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for head in (slice(0, 4), slice(4, 8)):
        for i in range(5):
            scores = torch.stack([queries[i, head] @ keys[j, head] / 2 for j in range(i + 1)])
            expected[i, head] = sum(w * values[j, head] for j, w in enumerate(scores.softmax(0)))
    torch.testing.assert_close(layer.attend(x)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "key"),
    [({"width": 10, "heads": 4}, "model.width"), ({"dropout": 1.0}, "model.dropout"), ({"depth": 0}, "model.depth")],
)
def test_wrong_options_of_the_network_are_refused(options: dict, key: str) -> None:
    assert refusal(lambda: CausalTransformer((5,), 3, **options)).startswith(key)


@pytest.mark.parametrize("in_shape", [(3, 8, 8), {"image": (5,)}, ((5,), (5,))])
def test_other_inputs_are_refused(in_shape: Any) -> None:
    with pytest.raises(ValueError, match=r"^model: "):
        CausalTransformer(in_shape, 3)
