"""No training step waits for the device: nothing in it needs a tensor's values on the host.

On a GPU such an operation stops the host until the device has caught up, and the device then waits for the host. Here
they are found on the CPU, by the operations themselves. Copies from one device to another cannot be: on a CPU there are
none.
"""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import NormMLP, experiment
from methods import FEW_QUICK, METHODS, QUICK
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.algorithms import FedAvg
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.engines import SequentialEngine

WAITING = {
    "_local_scalar_dense",  # item(), float(), int(), bool(), tolist() of one
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose results' values, or shapes, the host needs before it can go on."""

FETCHING = {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__}
"""What hands a tensor's values over, which on a CPU is no operation."""

ON_CPU_ALONE = {F.one_hot}
"""Functions that look at values on a CPU and nowhere else: they check them there."""


class Waits(TorchDispatchMode):
    """Notes, while `on`, what in a training step would wait for a GPU, and who called it."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.steps = False, 0
        self.seen: set[str] = set()
        self.calls = Calls(self.note)

    def __enter__(self) -> Any:
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.calls.function not in ON_CPU_ALONE and waits(func, args, kwargs or {}):
            self.note(func)
        return func(*args, **kwargs or {})

    def note(self, func: Any) -> None:
        if self.on:
            self.seen.add(f"{func.__name__.split('.')[0]} in {caller()}")


class Calls(TorchFunctionMode):
    """Knows which of torch's functions is being called."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.function, self.note = None, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.function = func
        if func in FETCHING:
            self.note(func)
        try:
            return func(*args, **kwargs or {})
        finally:
            self.function = None


def waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation waits for the device."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):  # a mask is looked through, unless one value goes where it is true
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and not (name != "index" and args[2].numel() == 1)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and any(isinstance(value, Tensor) for value in args)
    return name in WAITING or name.startswith("_linalg_")


TORCH = str(Path(torch.__file__).parent)
HERE = ("__torch_dispatch__", "__torch_function__", "note")


def caller() -> str:
    """The function that called torch, be it through Lightning."""
    frame = inspect.currentframe().f_back.f_back
    while frame.f_back and (frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_name in HERE):
        frame = frame.f_back
    owner = frame.f_locals.get("self")
    return f"{type(owner).__name__}.{frame.f_code.co_name}" if owner is not None else frame.f_code.co_name


def kinds(kind: type) -> list[type]:
    return [kind, *(below for child in kind.__subclasses__() for below in kinds(child))]


@pytest.fixture
def watched(monkeypatch: Any) -> Waits:
    """Looks from a client's first training step of an epoch to its last."""
    mode = Waits()

    def on(kept: Any, *args: Any) -> Any:
        mode.on, mode.steps = True, mode.steps + 1
        return kept(*args)

    def off(kept: Any, *args: Any) -> Any:
        mode.on = False
        return kept(*args)

    for kind in kinds(ClientModule):
        for name, what in (("training_step", on), ("on_train_epoch_end", off)):
            if name in vars(kind):
                kept = vars(kind)[name]
                monkeypatch.setattr(kind, name, lambda *args, kept=kept, what=what: what(kept, *args))
    return mode


def run_briefly(mode: Waits, tmp_path: Any, algorithm: Any, **options: Any) -> None:
    """A short run whose training steps are looked at."""
    run = experiment(tmp_path, algorithm, **{"rounds": 2, "clients_per_round": 2} | options)
    with mode:
        run.fit()
    assert mode.steps > 5


def waiting_in(mode: Waits) -> set[str]:
    return {found.rpartition(" in ")[2] for found in mode.seen}


def trains(shared: bool, **options: Any) -> dict[str, Any]:
    return {
        "engine": SequentialEngine(local_loop=shared),
        "trainer": {"accelerator": "cpu", "max_epochs": 1, **options},
    }


BY_NATURE = {
    "ProtoNet": "its tensors have a row for each class of the episode, which the host must count first",
    "FedSKC with ProtoNet": "likewise",
}
UNCLIPPED = ("SCAFFOLD", "FedCM", "FedDC", "MoFedSAM")
"""Methods that refuse to be clipped."""

CASES = [
    *(
        pytest.param(name, True, id=f"{name}-shared", marks=[pytest.mark.slow] * (name not in QUICK))
        for name in METHODS
    ),
    *(
        pytest.param(*one.values, False, marks=one.marks) if hasattr(one, "marks") else (one, False)
        for one in FEW_QUICK
    ),
]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("name", "shared"), CASES)
def test_no_step_waits(tmp_path: Any, watched: Waits, name: str, shared: bool) -> None:
    method, options = METHODS[name]
    clipped = {} if name in UNCLIPPED else {"gradient_clip_val": 1.0}
    run_briefly(watched, tmp_path, method(), **trains(shared, **clipped), **options)
    if name in BY_NATURE:
        assert {"_unique2 in Prototypical.forward", "index in Prototypical.forward"} <= watched.seen
        watched.seen = {found for found in watched.seen if not found.startswith("index_put in")}  # its gradient
        assert waiting_in(watched) == {"Prototypical.forward"}
    else:
        assert watched.seen == set()


@pytest.mark.filterwarnings("ignore:trainer.max_steps")
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shared", [True, False], ids=["local loop", "own fit"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 1.0, "precision": "bf16-mixed"},
        {"max_epochs": 2, "max_steps": 20},
    ],
    ids=["clipped by value", "bfloat16", "steps"],
)
def test_no_option_of_the_trainer_makes_it_wait(tmp_path: Any, watched: Waits, shared: bool, options: Any) -> None:
    run_briefly(watched, tmp_path, FedAvg(), model=NormMLP, **trains(shared, **options))
    assert watched.seen == set()


# --- That it would be seen ---


def masked(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[x > 0] = x[x > 0] * 2
    return copy


def filled(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[x > 0] = 0.0
    return copy


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "copy": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "mask as target": masked,
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.argmax(dim=1).bincount(),
    "repeats": lambda x: x.repeat_interleave(x.argmax(dim=1), dim=0),
    "singular values": lambda x: torch.linalg.svdvals(x),
}
GOES_ON = {
    "one_hot": lambda x: F.one_hot(x.argmax(dim=1), 10),
    "fill": filled,
    "rows": lambda x: x[x.argmax(dim=1) % len(x)],
    "repeats": lambda x: x.repeat_interleave(2, dim=0),
}


class Looking(LossTerm):
    """Looks at the logits in some way."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def forward(self, step: Step) -> Tensor:
        self.look(step.logits.detach())
        return 0 * step.logits.sum()


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("what", "shared"), [*((what, True) for what in WAITS), ("item", False), ("mask", False)])
def test_a_step_that_waits_is_seen(tmp_path: Any, watched: Waits, what: str, shared: bool) -> None:
    run_briefly(watched, tmp_path, FedAvg(loss_terms=[Looking(WAITS[what])]), rounds=1, **trains(shared))
    assert waiting_in(watched) == {"masked" if WAITS[what] is masked else "<lambda>"}


@pytest.mark.parametrize("what", GOES_ON)
def test_a_step_that_does_not_is_not(tmp_path: Any, watched: Waits, what: str) -> None:
    run_briefly(watched, tmp_path, FedAvg(loss_terms=[Looking(GOES_ON[what])]), rounds=1, **trains(1.0))
    assert watched.seen == set()


class Peeking(torch.optim.SGD):
    """Looks at a gradient before it steps."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.norm = float(self.param_groups[0]["params"][0].grad.norm())
        return loss


@pytest.mark.parametrize("shared", [True, False], ids=["local loop", "own fit"])
def test_an_optimizer_is_looked_at_too(tmp_path: Any, watched: Waits, shared: bool) -> None:
    run_briefly(watched, tmp_path, FedAvg(), rounds=1, optimizer=partial(Peeking, lr=0.1), **trains(shared))
    assert watched.seen == {"_local_scalar_dense in Peeking.step"}
