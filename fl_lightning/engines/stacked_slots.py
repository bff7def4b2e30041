"""Client modules that are built once and reset for each group of clients that are trained together."""

from __future__ import annotations

from torch import Tensor

from fl_lightning.engines.client_slot import ClientSlot
from fl_lightning.engines.module_factory import ModuleFactory
from fl_lightning.engines.stacked_step import StackedStep
from fl_lightning.engines.step_contents import ClientStep, StepContents, tensors_of


class StackedSlots:
    """Reusable client modules (slots) whose weights are rows of stacked tensors, so that a step copies no weights.

    Args:
        modules: Builds the slots.
        first: A new slot, for row 0.
        count: Number of rows.

    Attributes:
        count: Number of rows.
        stacks: The parameters and buffers of all backbones by name, `(count, ...)`. Row i belongs to slot i.
    """

    def __init__(self, modules: ModuleFactory, first: ClientSlot, count: int) -> None:
        self.modules, self.count = modules, count
        self._step: StackedStep | None = None
        self._slots: list[ClientSlot] = []
        self._addresses: list[list[tuple[Tensor, int]]] = []  # of each slot's tensors that are not in the flat tensor
        self._flat = first.weights.flat.new_zeros(count, len(first.weights.flat))
        parts = self._flat.split_with_sizes(first.layout.sizes, dim=1)[::2]
        sent = {name: part.view(count, *shape) for (name, shape), part in zip(first.layout.shapes, parts, strict=True)}
        tensors = tensors_of(first.module.backbone)
        self.stacks = {name: sent.get(name, value.new_empty(count, *value.shape)) for name, value in tensors}
        self._add(first)

    def slot(self, row: int) -> ClientSlot:
        """Return the reusable client module (slot) of a row, or a new one if the module is no longer intact.

        It is intact unless a submodule or tensor was replaced or moved, or a gradient hook was added. Ask for row 0
        first, then for row 1, and so on.
        """
        if row >= len(self._slots) or not self._is_intact(row):
            del self._slots[row:], self._addresses[row:]  # later rows are rebuilt when asked for: `_add` only appends
            slot = self.modules.new_slot()
            assert slot is not None  # the model has slots: the first one exists
            self._add(slot)
        return self._slots[row]

    @property
    def draws(self) -> bool:
        """Whether training steps may draw random numbers; False once it is known that they do not."""
        return self._step is None or bool(self._step.random_states)

    def step(self) -> StackedStep:
        """Return the `StackedStep` that runs a training step of all clients as one batched call.

        The clients may differ only in the weights of their backbones.
        """
        if self._step is None:
            # also kept: this round's class counts, which no step without loss terms reads
            steps = {row: StepContents(ClientStep(slot.module)) for row, slot in enumerate(self._slots)}
            self._step = StackedStep(steps, self._flat.device, {})
        return self._step

    def _is_intact(self, row: int) -> bool:
        return self._slots[row].is_intact and all(
            value.data_ptr() == address for value, address in self._addresses[row]
        )

    def _add(self, slot: ClientSlot) -> None:
        """Add a slot (a reusable client module), and move its tensors to the next row of the stacked tensors."""
        row = len(self._slots)
        slot.place(self._flat[row])
        sent = dict(slot.layout.shapes)
        unsent = {name: value for name, value in tensors_of(slot.module.backbone) if name not in sent}
        for name, value in unsent.items():
            value.data = self.stacks[name][row].copy_(value.detach())
        self._slots.append(slot)
        self._addresses.append([(value, value.data_ptr()) for value in unsent.values()])
        self._step = None
