"""`Adapted`: which layers get adapters, what is trained, and what is refused."""

from functools import partial

import pytest

pytest.importorskip("peft")

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import TASKS, save_model

from fl_lightning.algorithms.adapters.low_rank import adapter_layers
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import CNN, MLP, Adapted, FromModule, LoRA, Pretrained
from fl_lightning.models.adapted import merge_adapters

IDS = torch.tensor([[5, 9, 7, 12, 0, 0], [8, 1, 3, 4, 6, 2]])


def adapted(folder, targets, in_shape=(6,), task="sequence_classification", **options):
    base = partial(Pretrained, path=str(folder), task=task)
    return Adapted(in_shape, 2, base=base, adapter=LoRA(targets=targets, **{"r": 2, "alpha": 8} | options))


def trained(network):
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


def test_the_adapters_and_the_head_are_trained(tmp_path):
    network = adapted(save_model(tmp_path, "bert"), ["query", "value"])
    layer = "encoder.network.bert.encoder.layer.{}.attention.self.{}.lora_{}.default.weight"
    factors = {layer.format(n, name, part) for n in (0, 1) for name in ("query", "value") for part in "AB"}
    assert trained(network) == factors | {"head.weight", "head.bias"}
    assert len(trained(adapted(save_model(tmp_path / "r", "roberta"), ["query"])) - factors) == 4 + 4


def test_a_causal_model_keeps_its_tied_head(tmp_path):
    network = adapted(save_model(tmp_path, "gpt2", "causal_lm"), ["c_attn"], task="causal_lm")
    assert all("lora" in name for name in trained(network))
    assert network.head.weight is network.encoder.network.transformer.wte.weight
    assert network(IDS).shape == (2, 6, 60)


def test_modules_to_save_are_trained_whole(tmp_path):
    network = adapted(save_model(tmp_path, "bert"), ["query"], modules_to_save=["pooler.dense"])
    others = {name for name in trained(network) if "lora" not in name}
    assert others == {f"encoder.network.bert.pooler.dense.{part}" for part in ("weight", "bias")}


@pytest.mark.parametrize(("name", "targets"), [("bert", ["query", "dense"]), ("gpt2", ["c_attn", "c_proj"])])
@pytest.mark.parametrize("rslora", [False, True])
def test_outputs_are_those_of_peft(tmp_path, name, targets, rslora):
    """With the same factors. At the start they are those of the base, because B is zero."""
    save_model(tmp_path, name)
    network = adapted(tmp_path, targets, rslora=rslora).eval()
    base = TASKS["sequence_classification"].from_pretrained(tmp_path, local_files_only=True).eval()
    mask = (IDS != 0).long()
    with torch.no_grad():
        torch.testing.assert_close(network(IDS), base(IDS, attention_mask=mask).logits, rtol=1e-5, atol=1e-5)
    options = {"task_type": "SEQ_CLS", "use_rslora": rslora, "fan_in_fan_out": name == "gpt2"}
    theirs = get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules=targets, **options)).eval()
    factors = {key: torch.randn_like(value) for key, value in network.state_dict().items() if "lora" in key}
    network.load_state_dict(factors, strict=False)
    renamed = {f"base_model.model.{key.removeprefix('encoder.network.')}": value for key, value in factors.items()}
    assert not theirs.load_state_dict(renamed, strict=False).unexpected_keys
    with torch.no_grad():
        expected = theirs(input_ids=IDS, attention_mask=mask).logits
        torch.testing.assert_close(network(IDS), expected, rtol=1e-5, atol=1e-5)
        assert (base(IDS, attention_mask=mask).logits - network(IDS)).abs().max() < 1e-4
    scalings = {layer.scaling for layer in adapter_layers(network)}
    assert scalings == {8 / 2**0.5 if rslora else 4.0}


@pytest.mark.parametrize(
    ("base", "targets"),
    [
        (partial(MLP, hidden=(8, 8)), ["encoder.1", "encoder.3"]),
        (CNN, ["encoder.0"]),
        (
            partial(FromModule, module="torchvision.models.resnet18", head="fc", module_args={"num_classes": 10}),
            ["conv1"],
        ),
    ],
)
def test_the_product_of_each_layer_is_that_of_peft(base, targets):
    """Of linear layers and convolutions; `get_delta_weight` is peft's own function."""
    network = Adapted((3, 32, 32), 10, base=base, adapter=LoRA(r=2, targets=targets)).double()
    layers = adapter_layers(network)
    assert layers
    for layer in layers:
        state, module = network.state_dict(), network.get_submodule(layer.path)
        torch.nn.init.normal_(module.lora_B["default"].weight)
        product = module.lora_B["default"].weight.flatten(1) @ module.lora_A["default"].weight.flatten(1)
        change = layer.add(torch.zeros_like(state[layer.base]), product, torch.float64)
        torch.testing.assert_close(change, module.get_delta_weight("default"), rtol=0, atol=1e-12)
    assert network(torch.rand(2, 3, 32, 32).double()).shape == (2, 10)
    assert {name for name in trained(network) if "lora" not in name} == {"head.weight", "head.bias"}


def test_frozen_layers_are_in_train_mode_as_in_a_loop_by_hand(tmp_path):
    module = ClientModule(adapted(save_model(tmp_path, "bert"), ["query"]))
    assert not module.eval_layers


@pytest.mark.parametrize(
    ("name", "task", "targets", "message"),
    [
        ("bert", "sequence_classification", ["q_proj"], "layer 'q_proj' not found. Its layers are "),
        ("bert", "sequence_classification", ["word_embeddings"], "word_embeddings is an embedding"),
        ("bert", "sequence_classification", ["LayerNorm"], "is of the type LayerNorm"),
        ("bert", "sequence_classification", [], "it is empty"),
        ("gpt2", "causal_lm", ["head"], "'head': head shares its weight with another layer"),
        ("bert", "sequence_classification", ["head"], "layer 'head' not found"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(tmp_path, name, task, targets, message):
    save_model(tmp_path, name, task)
    with pytest.raises(ConfigError, match=r"^model\.adapter\.targets: ") as refused:
        adapted(tmp_path, targets, task=task)
    assert message in str(refused.value)


def test_a_refused_target_names_the_layers_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"query, key, value, dense\.$"):
        adapted(save_model(tmp_path, "bert"), ["q_proj"])


def test_modules_to_save_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model\.adapter\.modules_to_save: layer 'classifierr' not found"):
        adapted(save_model(tmp_path, "bert"), ["query"], modules_to_save=["classifierr"])


@pytest.mark.parametrize(("option", "value"), [("r", 0), ("alpha", 0), ("dropout", 1.0)])
def test_an_option_out_of_range_is_refused(option, value):
    with pytest.raises(ConfigError, match=rf"^model\.adapter\.{option}: "):
        LoRA(targets=["query"], **{option: value})


def test_a_base_without_a_separate_head_is_refused():
    with pytest.raises(ConfigError, match=r"^model: "):
        Adapted((4,), 2, base=lambda num_classes: torch.nn.Linear(4, num_classes), adapter=LoRA(targets=["0"]))


@pytest.mark.parametrize(("name", "targets"), [("bert", ["query", "dense"]), ("gpt2", ["c_attn"])])
def test_merged_adapters_are_part_of_the_weights(tmp_path, name, targets):
    network = adapted(save_model(tmp_path, name), targets).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    merged, base = merge_adapters(network), Pretrained((6,), 2, path=str(tmp_path))
    assert merged.state_dict().keys() == base.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS), network(IDS), rtol=1e-4, atol=1e-5)
        for layer in adapter_layers(network):
            b, a = (network.get_parameter(factor).double() for factor in (layer.b, layer.a))
            expected = layer.add(network.get_parameter(layer.base), b @ a, torch.float32)
            found = merged.get_parameter(f"{layer.path}.weight")
            torch.testing.assert_close(found.float(), expected.float(), rtol=1e-5, atol=1e-6)
    assert adapter_layers(network)  # the original keeps its adapters


def test_a_network_without_adapters_cannot_be_merged():
    with pytest.raises(ConfigError, match=r"^--merge: "):
        merge_adapters(MLP((4,), 2))
