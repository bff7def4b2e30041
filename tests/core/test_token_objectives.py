"""The objectives of tokens: losses, gradients and metrics against loops over single tokens."""

import math

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fl_lightning.client.module import ClientModule
from fl_lightning.core.objectives import IGNORED_TOKEN, CausalLM, TokenClassification
from fl_lightning.evaluation.evaluation import evaluate, evaluate_each
from fl_lightning.evaluation.extra_metrics import measures_of
from fl_lightning.evaluation.summary import is_lower_better

C = 5
LENGTHS = (7, 2, 4, 3)
OBJECTIVES = (TokenClassification(), CausalLM())


class Sentence:
    """The logits of one text without padding, `(length, C)`, and its labels. Some of the labels are not used."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(length, C, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, C, (length,), generator=generator)
        if length > 3:
            self.labels[2] = IGNORED_TOKEN

    def pairs(self, objective: TokenClassification) -> list[tuple[Tensor, int]]:
        """Return the logits and the class of each used token."""
        shift = int(isinstance(objective, CausalLM))
        labels = self.labels[shift:].tolist()
        rows = self.logits[: len(labels)]
        return [(row, label) for row, label in zip(rows, labels, strict=True) if label != IGNORED_TOKEN]


SENTENCES = [Sentence(length, seed) for seed, length in enumerate(LENGTHS)]


def batch_of(sentences: list[Sentence], width: int) -> tuple[Tensor, Tensor]:
    """Return a batch padded to a width. The logits at padding are large, so that counting one would be seen."""
    logits = torch.full((len(sentences), width, C), 50.0, dtype=torch.float64)
    logits[:, :, 0] = -50.0
    labels = torch.full((len(sentences), width), IGNORED_TOKEN)
    for row, sentence in enumerate(sentences):
        logits[row, : len(sentence.labels)] = sentence.logits
        labels[row, : len(sentence.labels)] = sentence.labels
    return logits, labels


def loop(objective: TokenClassification, sentences: list[Sentence]) -> tuple[float, float, int]:
    """Return the summed loss, the correct tokens and the number of tokens of unpadded sentences, token by token."""
    loss, correct, count = 0.0, 0, 0
    for sentence in sentences:
        for row, label in sentence.pairs(objective):
            values = row.tolist()
            loss += math.log(sum(map(math.exp, values))) - values[label]
            correct += values.index(max(values)) == label
            count += 1
    return loss, correct, count


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("width", [7, 12])
def test_loss_and_gradient_equal_a_loop_over_tokens(objective: TokenClassification, width: int) -> None:
    outputs, targets = batch_of(SENTENCES, width)
    loss, _, count = loop(objective, SENTENCES)
    assert float(objective.loss(outputs, targets)) == pytest.approx(loss / count, rel=1e-12)
    assert float(objective.loss(outputs, targets, "sum")) == pytest.approx(loss, rel=1e-12)
    assert int(objective.units(targets)) == count
    objective.loss(outputs.requires_grad_(), targets).backward()
    expected = torch.zeros_like(outputs)
    for i, sentence in enumerate(SENTENCES):
        shift = int(isinstance(objective, CausalLM))
        for position, label in enumerate(sentence.labels[shift:].tolist()):
            if label != IGNORED_TOKEN:
                gradient = sentence.logits[position].softmax(0)
                gradient[label] -= 1
                expected[i, position] = gradient / count
    torch.testing.assert_close(outputs.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("split", [(4,), (1, 3), (1, 1, 2)])
def test_evaluation_does_not_depend_on_batches_or_padding(objective: TokenClassification, split: tuple) -> None:
    parts = torch.arange(4).split(list(split))
    batches = [batch_of([SENTENCES[i] for i in part], 7 + len(part)) for part in parts]
    score = evaluate(torch.nn.Identity(), batches, objective)
    loss, correct, count = loop(objective, SENTENCES)
    expected = {"acc": correct / count, "loss": loss / count}
    if isinstance(objective, CausalLM):
        expected["perplexity"] = math.exp(loss / count)
    assert score.values == pytest.approx(expected, rel=1e-6)  # `evaluate` computes in float32
    assert score.n == 4


def test_each_client_has_the_perplexity_of_its_own_sentences() -> None:
    scores = evaluate_each(torch.nn.Identity(), [batch_of(SENTENCES, 9)], [1, 0, 3], CausalLM())
    for score, own in zip(scores, (SENTENCES[:1], [], SENTENCES[1:]), strict=True):
        if score is None:
            assert not own
            continue
        loss, _, count = loop(CausalLM(), own)
        assert score.values["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-6)


def test_the_perplexity_of_a_set_is_no_mean_of_perplexities() -> None:
    means = [loop(CausalLM(), [one])[0] / loop(CausalLM(), [one])[2] for one in SENTENCES]
    mean = sum(map(math.exp, means)) / len(means)
    score = evaluate(torch.nn.Identity(), [batch_of([one], 7) for one in SENTENCES], CausalLM())
    assert abs(score.values["perplexity"] / mean - 1) > 0.01


def test_a_causal_language_model_is_token_classification_of_the_next_token() -> None:
    outputs, targets = batch_of(SENTENCES, 8)
    shifted = torch.cat([targets[:, 1:], torch.full((4, 1), IGNORED_TOKEN)], dim=1)
    assert torch.equal(CausalLM().loss(outputs, targets), TokenClassification().loss(outputs, shifted))
    by_torch = F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    torch.testing.assert_close(CausalLM().loss(outputs, targets), by_torch, rtol=1e-12, atol=0)


def test_a_batch_without_used_tokens_has_no_loss_and_no_gradient() -> None:
    outputs = torch.randn(2, 3, C, requires_grad=True)
    loss = CausalLM().loss(outputs, torch.full((2, 3), IGNORED_TOKEN))
    loss.backward()
    assert loss.item() == 0
    assert not outputs.grad.any()


def test_half_precision_is_computed_in_float32() -> None:
    outputs, targets = batch_of(SENTENCES, 7)
    half = outputs.bfloat16()
    assert torch.equal(CausalLM().loss(half, targets), CausalLM().loss(half.float(), targets))


def test_metrics_of_torchmetrics_see_the_used_tokens_only() -> None:
    objective = CausalLM()
    outputs, targets = batch_of(SENTENCES, 9)
    measures = measures_of(
        [{"own": {"class_path": "MulticlassAccuracy", "init_args": {"average": "micro"}}}], objective, C
    )
    score = evaluate(torch.nn.Identity(), [(outputs, targets)], objective, measures)
    assert score.values["own"] == pytest.approx(score.values["acc"])


def test_a_lower_perplexity_is_better() -> None:
    assert is_lower_better("client/perplexity_worst_decile")
    assert is_lower_better("perplexity")


def test_a_perplexity_beyond_float64_is_infinite() -> None:
    assert CausalLM().metrics({"loss": 1000.0})["perplexity"] == math.inf


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_plain_trainer_logs_the_perplexity_of_the_whole_set(stage: str) -> None:
    module = ClientModule(torch.nn.Identity(), objective=CausalLM())
    batches = [batch_of(SENTENCES[:1], 7), batch_of(SENTENCES[1:], 12)]
    options = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    (logged,) = getattr(L.Trainer(**options), stage)(module, DataLoader(batches, batch_size=None), verbose=False)
    loss, correct, count = loop(CausalLM(), SENTENCES)
    prefix = {"validate": "val", "test": "test"}[stage]
    expected = {"acc": correct / count, "loss": loss / count, "perplexity": math.exp(loss / count)}
    assert logged == pytest.approx({f"{prefix}_{name}": value for name, value in expected.items()}, rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "labels",
    [
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, 4),
        torch.full((3, 4), C),
        torch.full((3, 4), -1),
        torch.tensor([[1, 1], [IGNORED_TOKEN, IGNORED_TOKEN]]),
    ],
)
def test_other_labels_are_refused(objective: TokenClassification, labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"per token|out of range|no label"):
        objective.check(labels, C)


def test_a_text_whose_only_label_is_the_first_is_refused_for_language_models() -> None:
    labels = torch.tensor([[1, 1], [1, IGNORED_TOKEN]])
    TokenClassification().check(labels, C)
    with pytest.raises(ValueError, match="sample 1"):
        CausalLM().check(labels, C)


def test_outputs_have_one_logit_for_each_token_and_class() -> None:
    assert CausalLM().output_shape(torch.zeros(2, 7), C) == (7, C)
