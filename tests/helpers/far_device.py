"""A simulated device: its tensors compute on the CPU, but behave as if they were on a GPU.

It refuses operations on tensors of two devices, and records every transfer and every wait for one. Results have the
same bytes as on the CPU, so whole runs can be compared.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

FAR = torch.device("lazy:0")  # a kind that torch knows and no machine has, with backward passes in the calling thread

ANYWHERE = {"_to_copy", "copy_", "set_"}
"""Operations whose arguments may be on two devices."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that may take indices from the CPU."""

WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "allclose", "nonzero", "masked_select", "bincount"}
"""Operations that wait for the device."""


class FarTensor(Tensor):
    """A tensor on the device. Wraps the tensor with its elements."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        far = Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=FAR,
            requires_grad=near.requires_grad,
        )
        far.near = near
        return far

    @property
    def data(self) -> FarTensor:
        return self.detach()

    @data.setter
    def data(self, other: FarTensor) -> None:
        self.near = other.near

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.near.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["near"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> FarTensor:
        return FarTensor(inner["near"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.ndim else repr(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a far tensor outside FarDevice")


class FarDevice(TorchDispatchMode):
    """Context in which the device exists.

    Attributes:
        fetched: The number of elements copied from the device, by calling function.
        sent: The number of elements copied to the device, by calling function.
        waits: The number of copies for which a GPU would be waited for, in either direction, by calling function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> FarDevice:
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its tensor on the CPU, then sends it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, FarTensor)]
        there = self._there(name, tensors, far, kwargs)
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
        if there and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        known = {id(tensor.near): tensor for tensor in far}
        args, kwargs = tree_map_only(FarTensor, lambda tensor: tensor.near, (args, kwargs))
        out = func(*args, **kwargs)
        self._note(name, far, there, out, blocks)
        if not there:
            return out
        return tree_map_only(Tensor, lambda own: known[id(own)] if id(own) in known else FarTensor(own), out)

    def _there(self, name: str, tensors: list[Tensor], far: list[FarTensor], kwargs: dict[str, Any]) -> bool:
        """Return whether the result of an operation is on the device."""
        if name == "copy_":
            return isinstance(tensors[0], FarTensor)
        here = [tensor for tensor in tensors if not isinstance(tensor, FarTensor) and tensor.ndim]
        if name in INDEXED:
            here = here if not isinstance(tensors[0], FarTensor) else []
        if far and here and name not in ANYWHERE:
            shapes = [f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors]
            raise RuntimeError(f"{name}: tensors on two devices, {', '.join(shapes)}")
        if (device := kwargs.get("device")) is not None:
            return torch.device(device).type == FAR.type
        return bool(far) and name not in ("_local_scalar_dense", "equal")

    def _note(self, name: str, far: list[FarTensor], there: bool, out: Any, blocks: bool) -> None:
        if far and (name in WAITING or (name in ("_to_copy", "copy_") and not there)):
            self.fetched[caller()] += out.numel() if isinstance(out, Tensor) and not there else 1
            self.waits[caller()] += 1
        elif there and ((name == "_to_copy" and not far) or (name == "copy_" and len(far) == 1)):
            self.sent[caller()] += out.numel()
            self.waits[caller()] += blocks


LIBRARIES = (str(Path(torch.__file__).parent), str(Path(sys.modules["lightning"].__file__ or "").parent), __file__)


def caller() -> str:
    """Return the innermost function on the stack that belongs to no library."""
    frame = inspect.currentframe().f_back.f_back
    while frame.f_back and (frame.f_code.co_filename.startswith(LIBRARIES) or frame.f_code.co_name.startswith("<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class FarAccelerator(CPUAccelerator):
    """Lightning's accelerator for the device."""

    def setup_device(self, device: torch.device) -> None:
        assert device == FAR

    @staticmethod
    def name() -> str:
        return "far"
