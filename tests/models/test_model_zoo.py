"""Every model: shapes, parameter counts, norms, heads, and modules of a user's own."""

import math

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError
from fl_lightning.data.text import PADDING
from fl_lightning.models import (
    CNN,
    CNN4,
    MLP,
    VGG11,
    BiLSTM,
    CosineLinear,
    FastText,
    FromModule,
    Head,
    LeNet,
    MobileNetV2,
    ResNet8,
    ResNet18,
    ResNet50,
    ShuffleNetV2,
    TextCNN,
)

NORMED = [ResNet8, ResNet18, ResNet50, VGG11, ShuffleNetV2, MobileNetV2]
IMAGE_MODELS = [MLP, CNN, CNN4, LeNet, *NORMED]
# ResNet-50 is built like ResNet-18, and slow.
LIGHT = [model for model in IMAGE_MODELS if model is not ResNet50]
LIGHT_NORMED = [model for model in NORMED if model is not ResNet50]
TEXT_MODELS = [FastText, TextCNN, BiLSTM]

# One input and the number of classes of each dataset.
IMAGE_DATA = {
    "MNIST": ((1, 28, 28), 10),
    "EMNIST": ((1, 28, 28), 47),
    "CIFAR-10 and SVHN": ((3, 32, 32), 10),
    "PathMNIST": ((3, 28, 28), 9),
    "Tiny-ImageNet": ((3, 64, 64), 200),
}
TEXT_DATA = {"AG News": ((30,), 4), "IMDB": ((50,), 2)}
FITS = [(model, data) for model in IMAGE_MODELS for data in IMAGE_DATA if model is not VGG11 or "MNIST" not in data]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def ids(*lengths: int, padded: int, seed: int = 0) -> torch.Tensor:
    """Return random texts with the given numbers of words, filled up with padding."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.full((len(lengths), padded), PADDING)
    for row, length in zip(batch, lengths, strict=True):
        row[:length] = torch.randint(1, 9_999, (length,), generator=generator)
    return batch


@pytest.fixture
def meta():
    """Build networks on the meta device, without memory, to count weights and sizes."""
    with torch.device("meta"):
        yield


# --- Every model on every dataset it fits ---


@pytest.mark.fast_cases(18)
@pytest.mark.parametrize(("model", "data"), FITS)
def test_image_models_compute_logits_with_encoder_and_head(model: type, data: str) -> None:
    in_shape, classes = IMAGE_DATA[data]
    backbone = model(in_shape, classes).eval()
    x = torch.rand(2, *in_shape)
    with torch.no_grad():
        features = backbone.encoder(x)
        assert features.shape == (2, backbone.feature_dim)
        assert backbone(x).shape == (2, classes)
        assert torch.equal(backbone(x), backbone.head(features))
    assert backbone.classifier.weight.shape[0] == classes


@pytest.mark.parametrize("data", TEXT_DATA)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_models_compute_logits_with_encoder_and_head(model: type, data: str) -> None:
    in_shape, classes = TEXT_DATA[data]
    backbone = model(in_shape, classes).eval()
    x = ids(7, 1, 0, padded=in_shape[0])
    features = backbone.encoder(x)
    assert features.shape == (3, backbone.feature_dim)
    assert backbone(x).shape == (3, classes)
    assert torch.equal(backbone(x), backbone.head(features))


@pytest.mark.parametrize("model", [*LIGHT, *TEXT_MODELS])
def test_every_weight_is_in_the_encoder_or_the_head_and_has_a_gradient(model: type) -> None:
    text = model in TEXT_MODELS
    backbone = model((8,) if text else (3, 32, 32), 4)
    x = ids(8, 5, 3, 8, padded=8) if text else torch.rand(4, 3, 32, 32)
    F.cross_entropy(backbone(x), torch.arange(4)).backward()
    names = list(backbone.state_dict())
    assert all(name.split(".")[0] in ("encoder", "head") for name in names)
    assert {name for name, _ in backbone.named_parameters()} <= set(names)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
    assert count(backbone) == count(backbone.encoder) + count(backbone.head)


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("model", [*LIGHT_NORMED, CNN, CNN4, LeNet])
def test_all_convolutions_are_in_the_encoder(model: type) -> None:
    backbone = model((3, 32, 32), 10)
    assert not any(isinstance(module, nn.Conv2d) for module in backbone.head.modules())
    # McMahan's CNN maps to features by a linear layer; elsewhere the head has all of them.
    linear = sum(isinstance(module, nn.Linear) for module in backbone.encoder.modules())
    assert linear == (model is CNN)


# --- Parameter counts ---


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize(
    ("model", "in_shape", "classes", "published"),
    [
        (CNN, (1, 28, 28), 10, 1_663_370),  # McMahan et al. 2017
        (CNN4, (1, 28, 28), 10, 582_026),  # the FedAvg CNN of many frameworks
        (CNN4, (3, 32, 32), 10, 878_538),
        (ResNet18, (3, 32, 32), 10, 11_173_962),  # the CIFAR ResNets that most papers use
        (ResNet50, (3, 32, 32), 10, 23_520_842),
        (VGG11, (3, 32, 32), 10, 9_231_114),
        (ShuffleNetV2, (3, 32, 32), 10, 1_263_854),
        (MobileNetV2, (3, 32, 32), 10, 2_236_682),
    ],
)
def test_parameter_counts_are_the_published_ones(model: type, in_shape, classes: int, published: int) -> None:
    assert count(model(in_shape, classes)) == published


def conv(inputs: int, outputs: int, size: int, bias: bool = True) -> int:
    return inputs * outputs * size**2 + outputs * bias


@pytest.mark.usefixtures("meta")
def test_lenet_has_two_convolutions_and_three_linear_layers() -> None:
    linear = (400 * 256 + 256) + (256 * 128 + 128) + 128 * 10  # the last without bias
    assert count(LeNet((3, 32, 32), 10)) == conv(3, 6, 5) + conv(6, 16, 5) + linear
    mnist = LeNet((1, 28, 28), 10, channels=(10, 20), pool=False)
    assert mnist.encoder(torch.rand(1, 1, 28, 28)).shape == (1, 20 * 20 * 20)
    assert mnist.classifier.weight.shape == (10, 128)
    assert mnist.classifier.bias is None


@pytest.mark.usefixtures("meta")
def test_vgg_11_with_the_layers_of_its_paper_has_28_million_parameters() -> None:
    convolutions = count(VGG11((3, 32, 32), 10).encoder)
    whole = count(VGG11((3, 32, 32), 10, head=Head(hidden=(4096, 4096))))
    assert whole == convolutions + (512 * 4096 + 4096) + (4096 * 4096 + 4096) + (4096 * 10 + 10) == 28_149_514
    assert whole > count(ResNet18((3, 32, 32), 10)) > count(CNN4((3, 32, 32), 10))


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize(
    ("model", "side"), [(ResNet18, 4), (ResNet50, 4), (ShuffleNetV2, 4), (MobileNetV2, 4), (VGG11, 1)]
)
def test_small_images_are_not_downsampled_too_early(model: type, side: int) -> None:
    sizes = []
    backbone = model((3, 32, 32), 10).eval()
    for module in backbone.encoder.modules():
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d)):
            module.register_forward_hook(lambda _, __, output: sizes.append(output.shape[-1]))
    backbone(torch.rand(1, 3, 32, 32))
    assert sizes[0] == 32
    assert sizes[-1] == side


# --- Normalisation ---


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("model", NORMED)
def test_group_norm_replaces_every_batch_norm(model: type) -> None:
    batch, group = model((3, 32, 32), 10), model((3, 32, 32), 10, norm="group")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in group.modules())
    norms = [
        sum(isinstance(m, kind) for m in net.modules())
        for net, kind in ((batch, nn.BatchNorm2d), (group, nn.GroupNorm))
    ]
    assert norms[0] == norms[1] > 0
    assert [name for name, _ in group.named_parameters()] == [name for name, _ in batch.named_parameters()]
    assert not list(group.buffers())


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("model", LIGHT_NORMED)
def test_with_group_norm_a_sample_does_not_depend_on_its_batch(model: type) -> None:
    backbone = model((3, 32, 32), 10, norm="group").train()
    x = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(backbone(x)[:1], backbone(x[:1]), rtol=1e-3, atol=1e-4)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("model", LIGHT_NORMED)
def test_both_norms_start_from_the_same_weights(model: type) -> None:
    torch.manual_seed(0)
    batch = model((3, 32, 32), 10)
    torch.manual_seed(0)
    group = model((3, 32, 32), 10, norm="group")
    for one, other in zip(batch.parameters(), group.parameters(), strict=True):
        assert torch.equal(one, other)


# --- Heads ---


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("model", [*LIGHT, *TEXT_MODELS])
def test_every_model_takes_every_option_of_a_head(model: type) -> None:
    options = Head(projection=12, prediction=7, hidden=(11,), mapping=(9, 8), classifier="bias_free")
    text = model in TEXT_MODELS
    backbone = model((8,) if text else (3, 32, 32), 4, head=options)
    x = ids(8, 5, 3, padded=8) if text else torch.rand(3, 3, 32, 32)
    features = backbone.encoder(x)
    assert features.shape == (3, 12)
    assert backbone.feature_dim == 12
    assert backbone.predictor(features).shape == (3, 12)
    assert backbone(x).shape == (3, 4)
    assert [m.out_features for m in backbone.head if isinstance(m, nn.Linear)] == [11, 9, 8, 4]
    assert backbone.classifier.bias is None
    assert {name.split(".")[0] for name in backbone.state_dict()} == {"encoder", "head", "predictor"}


def test_a_projection_is_linear_relu_linear() -> None:
    plain = Head(projection=256).attach(nn.Flatten(), 20, 3).encoder[1]
    assert [type(layer) for layer in plain] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [(m.in_features, m.out_features) for m in plain if isinstance(m, nn.Linear)] == [(20, 20), (20, 256)]


def test_a_predictor_has_batch_norm_on_its_hidden_layer_only() -> None:
    predictor = Head(prediction=6).attach(nn.Flatten(), 20, 3).predictor
    assert [type(layer) for layer in predictor] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert (predictor[1].num_features, predictor[3].out_features) == (6, 20)


def test_cosine_logits_are_scaled_cosines() -> None:
    layer = CosineLinear(5, 3)
    x = torch.rand(4, 5) * 100
    x[0] = 0
    expected = 10 * F.cosine_similarity(x[:, None], layer.weight[None], dim=2)
    torch.testing.assert_close(layer(x), expected)
    assert layer(x)[0].abs().max() == 0
    layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.scale.grad is not None
    assert Head(classifier="cosine").attach(nn.Flatten(), 5, 3).head.weight.shape == (3, 5)


def by_hand(layers: str, weights: dict, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of linear layers. `r` in the string marks a layer that is followed by ReLU."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    for name, followed_by in zip(names, layers, strict=True):
        x = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
        x = x.clamp(min=0) if followed_by == "r" else x
    return x


@pytest.mark.parametrize("classifier", ["linear", "bias_free"])
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"hidden": (7, 6)}, "rr-"),
        ({"mapping": (7, 6)}, "r--"),
        ({"mapping": (7,)}, "--"),
        ({"hidden": (9, 8), "mapping": (7, 6)}, "rrr--"),
        ({"hidden": (9,), "mapping": (7,)}, "r--"),
    ],
)
def test_relu_follows_every_layer_except_the_last_mapping_layer(options: dict, layers: str, classifier: str) -> None:
    head = Head(**options, classifier=classifier).attach(nn.Flatten(), 5, 3).head
    x = torch.randn(40, 5)
    torch.testing.assert_close(head(x), by_hand(layers, dict(head.state_dict()), x))
    assert [p.shape[0] for p in head.parameters() if p.dim() == 2] == [w for v in options.values() for w in v] + [3]
    assert ("bias" in dict(head[-1].named_parameters())) == (classifier == "linear")


@pytest.mark.parametrize("option", [{"projection": 0}, {"prediction": -1}, {"hidden": (8, 0)}, {"mapping": (8, 0)}])
def test_widths_below_one_are_refused(option: dict) -> None:
    with pytest.raises(ConfigError, match=f"^model.head.{next(iter(option))}: .* has a width below 1$"):
        Head(**option)


# --- Texts ---


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_padding_does_not_change_outputs(model: type) -> None:
    backbone = model((12,), 4).eval()
    short = ids(12, 7, 1, 0, padded=12)
    longer = F.pad(short, (0, 30), value=PADDING)
    torch.testing.assert_close(backbone(longer), backbone(short))
    alone = torch.cat([backbone(row[row != PADDING][None]) for row in short[:3]])
    torch.testing.assert_close(backbone(short)[:3], alone)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_outputs_depend_on_every_word(model: type) -> None:
    backbone = model((6,), 4).eval()
    short = ids(6, padded=6)
    for place in range(6):
        changed = short.clone()
        changed[0, place] = 77
        assert not torch.equal(backbone(changed), backbone(short))


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_ids_beyond_the_vocabulary_are_unknown(model: type) -> None:
    backbone = model((4,), 2, vocab_size=50).eval()
    assert torch.equal(backbone(torch.tensor([[3, 50, 9_000, 0]])), backbone(torch.tensor([[3, 1, 1, 0]])))


def test_fast_text_is_a_linear_layer_on_the_mean_of_word_vectors() -> None:
    backbone = FastText((5,), 3, vocab_size=20, embedding_dim=4)
    vectors = backbone.encoder[0].weight[[4, 9, 4]].mean(dim=0)
    expected = backbone.head.weight @ vectors + backbone.head.bias
    torch.testing.assert_close(backbone(torch.tensor([[4, 9, 4, 0, 0]]))[0], expected)
    assert count(backbone) == 20 * 4 + 4 * 3 + 3


def test_text_cnn_takes_each_filters_largest_response() -> None:
    backbone = TextCNN((6,), 3, vocab_size=20, embedding_dim=4, channels=2).eval()
    words, convolutions = backbone.encoder[0], backbone.encoder[1].convolutions
    sentence = [5, 7, 2, 9]
    rows = torch.cat([words.weight[sentence], torch.zeros(4, 4)])
    expected = []
    for size, layer in zip((3, 4, 5), convolutions, strict=True):
        for weight, bias in zip(layer.weight, layer.bias, strict=True):
            windows = [(weight * rows[i : i + size].T).sum() + bias for i in range(len(sentence))]
            expected.append(max(0.0, max(window.item() for window in windows)))
    features = backbone.encoder(torch.tensor([[*sentence, 0, 0]]))[0]
    torch.testing.assert_close(features, torch.tensor(expected))


def test_bi_lstm_averages_both_directions_over_the_words() -> None:
    backbone = BiLSTM((6,), 2, vocab_size=20, embedding_dim=4, hidden=3)
    words, lstm = backbone.encoder[0], backbone.encoder[1]
    rows = words.weight[[5, 7, 2]]
    expected = nn.LSTM.forward(lstm, rows[None])[0][0].mean(dim=0)
    torch.testing.assert_close(backbone.encoder(torch.tensor([[5, 7, 2, 0, 0, 0]]))[0], expected)


def test_padding_is_never_learnt() -> None:
    backbone = FastText((4,), 2)
    backbone(torch.tensor([[5, 0, 0, 0]])).sum().backward()
    assert backbone.encoder[0].weight.grad[PADDING].abs().max() == 0


# --- Refused inputs ---


@pytest.mark.parametrize("model", [CNN, CNN4, LeNet, *NORMED])
def test_image_models_refuse_other_shapes(model: type) -> None:
    with pytest.raises(ValueError, match=r"^model: .*images.* \(200,\)"):
        model((200,), 4)


@pytest.mark.parametrize(
    ("model", "side"), [(CNN, 3), (CNN4, 15), (LeNet, 15), (VGG11, 31), (ResNet8, 3), (ResNet18, 7), (MobileNetV2, 7)]
)
def test_images_that_are_too_small_are_refused(model: type, side: int) -> None:
    with pytest.raises(ValueError, match=f"at least {side + 1}x{side + 1}"):
        model((3, side, side), 4)
    assert model((3, side + 1, side + 1), 4).eval()(torch.rand(1, 3, side + 1, side + 1)).isfinite().all()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_models_refuse_images(model: type) -> None:
    with pytest.raises(ValueError, match=r"^model: .*token ids"):
        model((1, 28, 28), 4)


# --- A user's module ---


class UserModule(nn.Module):
    """A user's network with a nested head."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh())
        self.tail = nn.Sequential(nn.Dropout(0.0), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(x))


@pytest.mark.parametrize(("head", "prefix"), [("tail", "head.1."), ("tail.1", "head.")])
def test_a_users_module_is_cut_at_the_named_layer(head: str, prefix: str) -> None:
    torch.manual_seed(0)
    original = UserModule(width=9)
    torch.manual_seed(0)
    backbone = FromModule((1, 8, 8), 3, f"{__name__}.UserModule", head, {"width": 9})
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(backbone(x), original(x))
    assert torch.equal(backbone.encoder(x), original.body(x))
    assert backbone.feature_dim == 9
    assert backbone.classifier.weight.shape == (3, 9)
    assert set(backbone.state_dict()) == {
        "encoder.body.1.weight",
        "encoder.body.1.bias",
        prefix + "weight",
        prefix + "bias",
    }


def test_functions_of_torchvision_can_build_the_module() -> None:
    backbone = FromModule((3, 32, 32), 7, "torchvision.models.resnet18", "fc", {"num_classes": 7})
    assert backbone.feature_dim == 512
    assert "encoder.conv1.weight" in backbone.state_dict()
    assert "head.weight" in backbone.state_dict()
    assert count(backbone) == count(torchvision.models.resnet18(num_classes=7))


@pytest.mark.parametrize(
    ("module", "head", "arguments", "message"),
    [
        ("nowhere.Net", "fc", {}, "model.module: nowhere.Net cannot be built: No module named 'nowhere'"),
        (f"{__name__}.MissingModule", "fc", {}, "model.module: .*MissingModule cannot be built"),
        (f"{__name__}.UserModule", "tail", {"depth": 3}, "model.module: .*UserModule cannot be built: .*'depth'"),
        ("builtins.dict", "fc", {"a": 1}, "model.module: builtins.dict cannot be built: .*nn.Module"),
        (f"{__name__}.UserModule", "fc", {}, "model.head: .*UserModule has no layer 'fc'; its layers are body, tail"),
        (f"{__name__}.UserModule", "body.2", {}, "model.head: 'body.2' of .*UserModule holds no linear layer"),
        (f"{__name__}.UserModule", "", {}, "model.head: '' of .*UserModule"),
    ],
)
def test_modules_that_cannot_be_cut_are_refused(module: str, head: str, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        FromModule((1, 8, 8), 3, module, head, arguments)
    assert "\n" not in str(caught.value)


def test_initial_convolutions_are_he_normal() -> None:
    weight = ResNet18((3, 32, 32), 10).encoder.layer4[1].conv2.weight
    assert math.isclose(weight.std().item(), math.sqrt(2 / (512 * 9)), rel_tol=0.01)
