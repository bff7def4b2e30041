"""MLP, CNN and ResNet-8, compared with their layers written out."""

from collections.abc import Callable
from itertools import pairwise
from math import prod, sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.models import CNN, MLP, Backbone, ResNet8
from fl_lightning.models.layers import GlobalAveragePool


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def inputs(*in_shape: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, *in_shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", [MLP, CNN, ResNet8])
def test_initial_weights_depend_on_torchs_seed(family: Callable[..., Backbone]) -> None:
    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(family(in_shape=(3, 8, 8), num_classes=2).parameters())

    assert all(map(torch.equal, weights(1), weights(1)))
    assert not torch.equal(weights(1)[0], weights(2)[0])


# --- MLP ---


@pytest.mark.parametrize("hidden", [(5,), (16, 8, 4), [6, 3]])
def test_mlp_alternates_linear_layers_and_relu(hidden: tuple[int, ...]) -> None:
    model = MLP((2, 3, 4), 7, hidden)
    x = inputs(2, 3, 4)
    *layers, last = [(p.detach(), q.detach()) for p, q in zip(*[iter(model.parameters())] * 2, strict=True)]
    features = x.reshape(3, 24)
    for weight, bias in layers:
        features = (features @ weight.T + bias).clamp(min=0)
    torch.testing.assert_close(model.encoder(x), features)
    torch.testing.assert_close(model(x), features @ last[0].T + last[1])
    widths = [24, *hidden, 7]
    assert size(model) == sum((n + 1) * m for n, m in pairwise(widths))


def test_mlp_with_batchnorm_normalizes_the_input_of_each_relu() -> None:
    model = MLP((2, 3), 4, (5, 3), norm="batch")
    linear, norm, relu, *others = model.encoder[1:]
    x = inputs(2, 3)
    before = linear(x.flatten(1))
    expected = ((before - before.mean(0)) / (before.var(0, unbiased=False) + 1e-5).sqrt()).clamp(min=0)
    torch.testing.assert_close(relu(norm(before)), expected)
    assert [type(layer).__name__ for layer in others] == ["Linear", "BatchNorm1d", "ReLU"]


@pytest.mark.parametrize("hidden", [(), (0,), (8, -1)])
def test_mlp_refuses_layers_without_units(hidden: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^model.hidden .*\["):
        MLP((4,), 2, hidden)


# --- CNN ---


def test_cnn_equals_its_layers_written_out() -> None:
    model = CNN((2, 9, 11), 4, feature_dim=10)
    w1, b1, w2, b2, w3, b3, w4, b4 = model.parameters()
    x = inputs(2, 9, 11)
    first = F.max_pool2d(F.conv2d(x, w1, b1, padding=2).clamp(min=0), 2)
    second = F.max_pool2d(F.conv2d(first, w2, b2, padding=2).clamp(min=0), 2)
    features = (second.flatten(1) @ w3.T + b3).clamp(min=0)
    torch.testing.assert_close(model.encoder(x), features)
    torch.testing.assert_close(model(x), features @ w4.T + b4)


# --- ResNet8 ---


def batch_norm(x: Tensor, layer: nn.BatchNorm2d, training: bool) -> Tensor:
    mean, var = layer.running_mean, layer.running_var
    if training:
        mean, var = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), unbiased=False)
    scale = layer.weight / torch.sqrt(var + 1e-5)
    return (x - mean[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None]


def resnet8(model: ResNet8, x: Tensor, training: bool) -> Tensor:
    """Return the features, computed as in He et al.: a 1x1 convolution is the shortcut if the shape changes."""
    convs = iter([module for module in model.modules() if isinstance(module, nn.Conv2d)])
    norms = iter([module for module in model.modules() if isinstance(module, nn.BatchNorm2d)])

    def conv_norm(x: Tensor, stride: int, padding: int) -> Tensor:
        return batch_norm(F.conv2d(x, next(convs).weight, stride=stride, padding=padding), next(norms), training)

    x = conv_norm(x, 1, 1).clamp(min=0)
    for stride in (1, 2, 2):
        inner = conv_norm(conv_norm(x, stride, 1).clamp(min=0), 1, 1)
        x = (inner + (x if stride == 1 else conv_norm(x, stride, 0))).clamp(min=0)
    assert next(convs, None) is None
    return x.sum(dim=(2, 3)) / prod(x.shape[2:])


@pytest.mark.parametrize("training", [False, True])
def test_resnet8_equals_its_layers_written_out(training: bool) -> None:
    torch.manual_seed(0)
    model = ResNet8((2, 9, 12), 5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                values.uniform_(0.5, 1.5)
    x = inputs(2, 9, 12)
    with torch.no_grad():
        expected = resnet8(model, x, training)
        features = model.train(training).encoder(x)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(model.head(features), expected @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 47), (3, 100)])
def test_resnet8_size_follows_from_its_layers(channels: int, classes: int) -> None:
    stem = 9 * channels * 64 + 2 * 64
    first = 2 * (9 * 64 * 64 + 2 * 64)
    second = 9 * 64 * 128 + 9 * 128 * 128 + 64 * 128 + 3 * 2 * 128
    third = 9 * 128 * 256 + 9 * 256 * 256 + 128 * 256 + 3 * 2 * 256
    assert size(ResNet8((channels, 32, 32), classes)) == stem + first + second + third + 257 * classes


def test_resnet8_convolutions_are_initialised_he_normal_by_fan_out() -> None:
    torch.manual_seed(0)
    for module in ResNet8((3, 32, 32), 10).modules():
        if isinstance(module, nn.Conv2d):
            weight, n = module.weight.detach(), module.weight.numel()
            std = sqrt(2 / (module.out_channels * prod(module.kernel_size)))
            assert abs(weight.mean()) < 4 * std / sqrt(n)
            assert abs(weight.std() / std - 1) < 4 / sqrt(2 * n)
            assert weight.abs().max() > 2.5 * std  # a uniform distribution would end at 1.73
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_global_average_pool_is_the_mean_over_positions() -> None:
    x = inputs(4, 3, 5)
    expected = torch.tensor([[sum(row.sum().item() for row in channel) / 15 for channel in image] for image in x])
    torch.testing.assert_close(GlobalAveragePool()(x), expected)
