"""What each method's docstring says about the bytes of a round, and about what is kept from round to round."""

import re

import pytest
from experiments import ONE_EPOCH, digits, finished
from methods import CLASSES, METHODS
from torch import nn

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.weights import buffer_names

KEPT = re.compile(r"Kept by (a client|the server): \w")
SENTENCE = re.compile(r"Bytes a round, each participant(, at most)?: down `([^`]+)`, up `([^`]+)`")


def formulas(kind: type[Algorithm]) -> tuple[str, str, bool]:
    """Return the formulas of bytes down and up in a class's docstring, and whether they are bounds."""
    found = SENTENCE.search(" ".join((kind.__doc__ or "").split()))
    assert found, f"{kind.__name__}: no sentence like: Bytes a round, each participant: down `model`, up `model + 8`"
    return found[2], found[3], bool(found[1])


def norm_layers(backbone: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers of a network."""
    return [layer for layer in backbone.modules() if isinstance(layer, nn.BatchNorm1d)]


def variables(run) -> dict[str, int]:
    """Return the variables of the formulas, in addition to the method's attributes."""
    backbone = run.worker.template.backbone
    entries = {name: value.numel() * value.element_size() for name, value in backbone.state_dict().items()}
    frozen = {name for name, value in backbone.named_parameters() if not value.requires_grad and "lora" not in name}
    return {
        "trained": sum(size for name, size in entries.items() if name not in frozen),
        "base": sum(size for name, size in entries.items() if name.endswith(".base_layer.weight")),
        "A": sum(size for name, size in entries.items() if ".lora_A." in name),
        "B": sum(size for name, size in entries.items() if ".lora_B." in name),
        "round": run.rounds,
        "model": sum(entries.values()),
        "encoder": sum(size for name, size in entries.items() if name.startswith("encoder.")),
        "head": sum(size for name, size in entries.items() if name.startswith("head.")),
        "buffers": sum(entries[name] for name in buffer_names(backbone)),
        "norm": sum(v.nbytes for layer in norm_layers(backbone) for v in layer.state_dict().values()),
        "P": sum(p.numel() for p in backbone.parameters()),
        "T": len(list(backbone.parameters())),
        "C": run.data.data.num_classes,
        "d": backbone.feature_dim,
        "N": run.scenario.clients,
        "K": run.clients_per_round,
    }


def cases():
    """Return every method. Those that send whole models like FedAvg are in the thorough tier."""
    for name, kind in CLASSES.items():
        is_like_fedavg = "down `model`, up `model + 8`" in (getattr(kind, "func", kind).__doc__ or "")
        if name != "Algorithm":
            yield pytest.param(name, marks=pytest.mark.thorough if is_like_fedavg and name != "FedAvg" else ())


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("name", list(cases()))
def test_bytes_of_a_round_and_what_is_kept_are_those_of_the_docstring(tmp_path, name):
    method, options = METHODS[name]
    algorithm = method()
    scenario = digits(6, alpha=100.0)  # so even that every client holds every class
    run = finished(tmp_path, algorithm, **options | {"scenario": scenario, "rounds": 2, "trainer": ONE_EPOCH})
    assert (run.data.class_counts() > 0).all()
    down, up, bound = formulas(type(algorithm))
    names = {name: value for name, value in vars(algorithm).items() if not name.startswith("_")} | variables(run)
    counted = [int(run.csv.rows[-1][f"comm/{way}_bytes"]) for way in ("down", "up")]
    expected = [run.clients_per_round * eval(formula, {}, names) for formula in (down, up)]
    assert counted == expected or (bound and counted[0] <= expected[0] and counted[1] <= expected[1])
    kept = KEPT.findall(" ".join((type(algorithm).__doc__ or "").split()))
    assert ("a client" in kept) == any(run.memory.values())
    if algorithm.server and run.state.keys() > {"model"} and run.state.keys() != {"model", "weights"}:
        assert "the server" in kept, "`weights` are those of the round's clients, for callbacks"
