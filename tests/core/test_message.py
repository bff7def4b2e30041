import numpy as np
import pytest
import torch

from fl_lightning.core.message import Message, Upload

WIDTHS = {
    torch.float64: 8,
    torch.float32: 4,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.int64: 8,
    torch.uint8: 1,
    torch.bool: 1,
}


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
def test_a_tensor_costs_its_elements_times_their_width(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    elements = int(np.prod(shape))
    assert Message({"model/w": torch.zeros(shape, dtype=dtype)}).nbytes == elements * WIDTHS[dtype]


def test_every_number_costs_eight_bytes_and_nothing_costs_nothing() -> None:
    assert Message().nbytes == 0
    assert Message(numbers={"n_samples": 1, "loss": 0.5, "big": 2**62}).nbytes == 24


def test_bytes_add_up_over_sections_and_numbers() -> None:
    sections = {"model": {"w": torch.zeros(10, 3), "b": torch.zeros(10)}, "knowledge": {"m": torch.zeros(7).double()}}
    assert Message.pack(sections, n_samples=3, share=0.25).nbytes == 4 * (30 + 10) + 8 * 7 + 8 * 2


def test_a_view_costs_what_it_shows_not_what_it_stands_on() -> None:
    base = torch.zeros(100)
    assert Message({"a/view": base[::10]}).nbytes == 40
    assert Message({"a/expanded": torch.zeros(1).expand(5)}).nbytes == 20


def test_sections_come_out_as_they_went_in() -> None:
    sections = {"model": {"encoder.w": torch.rand(2), "head.w": torch.rand(3)}, "mean": {"values": torch.rand(4)}}
    message = Message.pack(sections, n_samples=9)
    assert set(message.tensors) == {"model/encoder.w", "model/head.w", "mean/values"}
    assert message.numbers == {"n_samples": 9}
    for name, content in sections.items():
        section = message.section(name)
        assert list(section) == list(content)
        assert all(section[key] is content[key] for key in content)


def test_a_section_does_not_take_in_one_whose_name_only_begins_alike() -> None:
    message = Message.pack({"model": {"w": torch.zeros(1)}, "model_ema": {"w": torch.ones(1)}})
    assert list(message.section("model")) == ["w"]
    assert message.section("model")["w"].item() == 0
    assert list(message.without("model").tensors) == ["model_ema/w"]


def test_a_section_that_did_not_travel_is_empty() -> None:
    assert Message.pack({"model": {"w": torch.zeros(1)}}).section("knowledge") == {}


def test_without_drops_one_section_and_leaves_the_original_alone() -> None:
    message = Message.pack({"model": {"w": torch.zeros(3)}, "mean": {"m": torch.zeros(5)}}, n_samples=2)
    rest = message.without("model")
    assert list(rest.tensors) == ["mean/m"]
    assert rest.numbers == {"n_samples": 2}
    assert set(message.tensors) == {"model/w", "mean/m"}


def test_plus_adds_sections_and_leaves_the_original_alone() -> None:
    message = Message.pack({"model": {"w": torch.zeros(3)}}, n_samples=2)
    more = message.plus({"mean": {"m": torch.zeros(5)}})
    assert set(more.tensors) == {"model/w", "mean/m"}
    assert more.numbers == {"n_samples": 2}
    assert more.nbytes == 8 * 4 + 8
    assert set(message.tensors) == {"model/w"}


@pytest.mark.parametrize("value", [np.zeros(3), [1.0], 1.0, None, "w"])
def test_only_tensors_travel_as_tensors(value: object) -> None:
    with pytest.raises(TypeError, match=r"Message.tensors\['model/w'\] is a \w+"):
        Message({"model/w": value})


@pytest.mark.parametrize("value", [True, np.float64(1), np.int64(1), torch.ones(()), "1", None, 1j])
def test_only_plain_numbers_travel_as_numbers(value: object) -> None:
    with pytest.raises(TypeError, match=r"Message.numbers\['loss'\] is a \w+"):
        Message(numbers={"loss": value})


def test_a_message_cannot_be_given_other_content() -> None:
    with pytest.raises(AttributeError):
        Message().tensors = {"model/w": torch.zeros(1)}


def test_two_messages_share_no_default_content() -> None:
    assert Message().tensors is not Message().tensors
    assert Message().numbers is not Message().numbers


def test_an_upload_knows_its_samples() -> None:
    upload = Upload(3, Message(numbers={"n_samples": 12}))
    assert (upload.client, upload.n_samples) == (3, 12)
