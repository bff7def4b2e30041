"""How far each adapter rule is from the exact mean of the products: the table of docs/correctness.md."""

import re
from pathlib import Path

import torch

from fl_lightning.algorithms import FedExLoRA, FedIT, FlexLoRA, FLoRA
from fl_lightning.algorithms.adapters.low_rank import AdapterLayer
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round

PAGE = Path(__file__).parents[2] / "docs" / "correctness.md"
LAYER, SIZES, RANK, WIDTH = AdapterLayer("layer"), (1, 2, 5), 2, 8


def example():
    """Return the factors `(B, A)` of three clients of a square layer in float64, from a fixed seed."""
    drawn = torch.Generator().manual_seed(0)
    shapes = [((WIDTH, RANK), (RANK, WIDTH))] * 3
    return [tuple(torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in pair) for pair in shapes]


def mean(values):
    return sum(size * value for size, value in zip(SIZES, values, strict=True)) / sum(SIZES)


def after_round(method, factors):
    """Return the weight `W + B A` after a round of a method that begins with `W = 0`, by the method's own server."""
    zero = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    (b, a), server = factors[0], method().aggregator
    server.layers = (LAYER,)
    before = {"model": {LAYER.b: torch.zeros_like(b), LAYER.a: a, LAYER.base: zero}}
    uploads = [
        Upload(client, Message.pack({"model": {LAYER.b: b, LAYER.a: a}}, n_samples=size))
        for client, (size, (b, a)) in enumerate(zip(SIZES, factors, strict=True))
    ]
    round = Round(1, before, seed=1)
    model = before["model"] | server.finish(fold_all(server, uploads, round), round, {})["model"]
    return model[LAYER.base] + model[LAYER.b] @ model[LAYER.a]


def errors():
    """Return `||aggregate - exact|| / ||exact||` of each row of the table."""
    factors = example()
    exact = mean([b @ a for b, a in factors])
    same_a = [(b, factors[0][1]) for b, _ in factors]
    mean_b, mean_a = (mean([pair[one] for pair in factors]) for one in (0, 1))
    first = SIZES[0] / sum(SIZES)

    def error(aggregate, target=exact):
        return float(torch.linalg.matrix_norm(aggregate - target) / torch.linalg.matrix_norm(target))

    return {
        "FedIT": error(after_round(FedIT, factors)),
        "FFA-LoRA, RoLoRA": error(after_round(FedIT, same_a), mean([b @ a for b, a in same_a])),
        "FedEx-LoRA": error(after_round(FedExLoRA, factors)),
        "FLoRA": error(after_round(FLoRA, factors)),
        "FlexLoRA": error(after_round(FlexLoRA, factors)),
        "FedIT in FLoRA's code": error(first**2 * factors[0][0] @ factors[0][1]),
        "FedEx-LoRA in its code": error(mean_b @ mean_a + (exact - mean_b @ mean_a).T),
    }


def test_the_documented_errors_are_those_of_the_methods():
    rows = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| ([\d.]+) \|$", PAGE.read_text(), re.M))
    computed = {name: f"{error:.3f}" if error > 1e-12 else "0" for name, error in errors().items()}
    assert rows == computed


def test_flexloras_error_is_that_of_the_discarded_singular_values():
    exact = mean([b @ a for b, a in example()])
    values = torch.linalg.svdvals(exact)
    discarded = float(values[RANK:].square().sum().sqrt() / torch.linalg.matrix_norm(exact))
    assert abs(errors()["FlexLoRA"] - discarded) < 1e-12


def test_the_example_has_an_error_to_correct():
    found = errors()
    assert found["FedIT"] > 0.1
    assert found["FlexLoRA"] < found["FedIT"]
