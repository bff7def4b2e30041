"""`Pretrained`: models of Hugging Face from a folder, split into encoder and head."""

from functools import partial

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tiny_models import CONFIGS, TASKS, save_model

from fl_lightning.cli.main import main
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.trusted_imports import Untrusted, untrusted
from fl_lightning.models import Adapted, LoRA, Pretrained, with_encoder
from fl_lightning.models.wrapped import build_network

IDS = torch.tensor([[5, 9, 7, 12, 0, 0], [8, 1, 3, 4, 6, 2]])
MASK = (IDS != 0).long()
TEXT_SHAPE = {"input_ids": (6,), "attention_mask": (6,)}
MODELS = [
    *((name, "sequence_classification") for name in ("bert", "roberta", "distilbert", "gpt2", "llama")),
    *(
        ("bert", "token_classification"),
        ("gpt2", "token_classification"),
        ("gpt2", "causal_lm"),
        ("llama", "causal_lm"),
    ),
]


def original(folder, task):
    return TASKS[task].from_pretrained(folder, local_files_only=True).eval()


@pytest.mark.parametrize(("name", "task"), MODELS)
def test_outputs_are_those_of_hugging_face(tmp_path, name, task):
    save_model(tmp_path, name, task, labels=3)
    network = Pretrained(TEXT_SHAPE, 3, path=str(tmp_path), task=task)
    assert network.training
    with torch.no_grad():
        expected = original(tmp_path, task)(input_ids=IDS, attention_mask=MASK).logits
        features, logits = network.eval().features_and_logits(Inputs({"input_ids": IDS, "attention_mask": MASK}))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.1
    assert features.shape == (*expected.shape[:-1], network.feature_dim)
    assert with_encoder(network).head.weight.shape == (expected.shape[-1], network.feature_dim)


def test_images_are_a_tensor(tmp_path):
    save_model(tmp_path, "vit", "image_classification", labels=3)
    network, x = (
        Pretrained((1, 8, 8), 3, path=str(tmp_path), task="image_classification").eval(),
        torch.rand(2, 1, 8, 8),
    )
    with torch.no_grad():
        expected = original(tmp_path, "image_classification")(pixel_values=x).logits
        torch.testing.assert_close(network(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_padding_of_a_tensor_of_token_ids_is_masked(tmp_path, name):
    save_model(tmp_path, name)
    network = Pretrained((6,), 2, path=str(tmp_path)).eval()
    with torch.no_grad():
        expected = original(tmp_path, "sequence_classification")(input_ids=IDS, attention_mask=MASK).logits
        torch.testing.assert_close(network(IDS), expected, rtol=1e-5, atol=1e-5)
        unmasked = network(Inputs({"input_ids": IDS, "attention_mask": torch.ones_like(MASK)}))
    if name == "bert":  # GPT-2 looks back only
        assert (unmasked - expected).abs().max() > 1e-4


def test_without_weights_they_are_random_and_depend_on_the_seed(tmp_path):
    config = CONFIGS["bert"]()
    config.save_pretrained(tmp_path)
    networks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        networks.append(Pretrained((6,), 2, path=str(tmp_path), weights=False).state_dict())
    name = "encoder.network.bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(networks[0][name], networks[1][name])
    assert not torch.equal(networks[0][name], networks[2][name])
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        Pretrained((6,), 2, path=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("bert", ("head",)),
        ("roberta", ("encoder.network.classifier.dense", "head")),
        ("distilbert", ("encoder.network.pre_classifier", "head")),
    ],
)
def test_new_layers_are_those_outside_of_the_pretrained_model(tmp_path, name, layers):
    save_model(tmp_path, name)
    network = Pretrained((6,), 2, path=str(tmp_path))
    assert network.new_layers == layers
    assert all(network.get_submodule(layer) for layer in layers)


def test_layers_that_the_weights_lack_are_new(tmp_path):
    transformers.BertForMaskedLM(CONFIGS["bert"]()).save_pretrained(tmp_path)  # has no pooler
    network = Pretrained((6,), 2, path=str(tmp_path))
    assert network.new_layers == ("encoder.network.bert.pooler.dense", "head")
    adapted = Adapted((6,), 2, base=partial(Pretrained, path=str(tmp_path)), adapter=LoRA(targets=["query"]))
    assert adapted.get_parameter("encoder.network.bert.pooler.dense.weight").requires_grad


def test_the_network_is_not_used(tmp_path, no_network):
    save_model(tmp_path, "bert")
    Pretrained((6,), 2, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^model\.path: folder 'bert-base-uncased' "):
        Pretrained((6,), 2, path="bert-base-uncased")


def test_an_untrusted_config_cannot_download(tmp_path):
    with (
        untrusted(Untrusted({"model.download": True}, "", "Fix it.")),
        pytest.raises(ConfigError, match=r"^model\.down"),
    ):
        Pretrained((6,), 2, path="bert-base-uncased", download=True)


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("gpt2 without padding", "sequence_classification", "pad_token_id"),
        ("gemma", "causal_lm", "Gemma2ForCausalLM changes the outputs of its last layer"),
        ("vit", "image_classification", "sequence_classification"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_one_line(tmp_path, name, task, message):
    save_model(tmp_path, name, task)
    task = "causal_lm" if name == "gemma" else "sequence_classification"
    with pytest.raises(ConfigError, match=r"^model\.path: ") as refused:
        Pretrained((6,), 2, path=str(tmp_path), task=task)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_padding_token_makes_gpt2_a_classifier(tmp_path):
    save_model(tmp_path, "gpt2 without padding")
    network = Pretrained((6,), 2, path=str(tmp_path), pad_token_id=0).eval()
    with torch.no_grad():
        alone = network(IDS[:1, :4])
        torch.testing.assert_close(network(IDS)[:1], alone, rtol=1e-5, atol=1e-5)


def test_a_model_of_this_package_still_refuses_several_inputs():
    from fl_lightning.models import MLP

    with pytest.raises(ConfigError, match="MLP takes one tensor"):
        build_network(MLP, TEXT_SHAPE, 2)


def test_the_id_of_a_token_is_not_negative(tmp_path):
    with pytest.raises(ConfigError, match=r"model.pad_token_id"):
        Pretrained(TEXT_SHAPE, 3, path=str(tmp_path), pad_token_id=-1)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "AutoModel", "BertModel.from_pretrained"])
def test_a_class_of_transformers_as_the_model_is_refused_with_the_name_of_ours(name, capsys):
    assert main(["fit", "--config", "digits_fedavg", "--model", f"transformers.{name}", "--fast"]) == 2
    assert f"model: transformers.{name} " in (message := capsys.readouterr().err)
    assert "Pretrained" in message
