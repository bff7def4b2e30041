"""Set-up that a GPU needs once per run: data on the device, memory layout, compilation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_lightning.core.flat_tensors import map_tensors
from fl_lightning.core.message import Message
from fl_lightning.data import LoadedData
from fl_lightning.data.lazy import LazySamples
from fl_lightning.models import Backbone


def resident(data: LoadedData, device: torch.device) -> LoadedData:
    """Return the dataset on the training device, or unchanged if it takes more than half of the free memory there.

    Args:
        data: The dataset, in the computer's memory.
        device: Where clients train.
    """
    if device.type == "cpu" or isinstance(data.x_train, LazySamples):
        return data
    tensors = {name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    if sum(value.nbytes for value in tensors.values()) > free_memory(device) // 2:
        return data
    return replace(data, **{name: value.to(device) for name, value in tensors.items()})


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or 0 for devices that do not report them."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def has_doubles(device: torch.device) -> bool:
    """Return whether a device supports float64."""
    return device.type != "mps"


class DeviceCopies:
    """Copies the weights in server messages to a device, except tensors that were also in the previous message.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Keys are the id of a tensor and its number of changes. The tensor is stored too, so that its id stays unique.
        self._last: dict[tuple[int, object], tuple[Tensor, Tensor]] = {}

    def __call__(self, download: Message) -> Message:
        """Return a client's download with its weights on the device. Callers must not change these weights in place."""
        before, self._last = self._last, {}

        def there(value: Tensor) -> Tensor:
            key = (id(value), times_written(value))
            self._last[key] = before.get(key) or (value, value.to(self.device))
            return self._last[key][1]

        model = map_tensors(there, download.section("model"))
        return Message.pack({**download.sections, "model": model}, **download.numbers)


def times_written(value: Tensor) -> object:
    """Return a tensor's number of in-place changes, or a unique object for inference tensors, which have no count."""
    return object() if value.is_inference() else value._version


def prefers_channels_last(network: nn.Module, device: torch.device, precision: str) -> bool:
    """Return True if a network convolves in half precision on a CUDA GPU, where channels-last images are faster."""
    convolves = any(isinstance(part, nn.Conv2d) for part in network.modules())
    return convolves and device.type == "cuda" and precision.startswith(("bf16", "16"))


def channels_last(x: Tensor) -> Tensor:
    """Convert a batch of images to channels-last memory format. Convolutions then compute in this format.

    cuDNN and oneDNN take the format from the images and convert the weights, which are small. The weights themselves
    keep their format, because all are views of one tensor (`ClientSlot`).
    """
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def compile_backbone(backbone: nn.Module) -> None:
    """Compile a network in place with `torch.compile`. All clients and rounds reuse the compiled code.

    The encoder and the head are compiled apart where the module has them, since loss terms look between the two. A
    second size of batch makes the graph's batch size free, so that ragged last batches do not compile again.
    """
    for part in (backbone.encoder, backbone.head) if isinstance(backbone, Backbone) else (backbone,):
        part.compile()
