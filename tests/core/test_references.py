"""`references.bib`: every method has a source, and every entry is complete."""

import re

import pytest

from fl_lightning.cli import catalogue
from fl_lightning.cli.options import options_of
from fl_lightning.core.references import (
    PACKAGE,
    VENUE_FIELDS,
    all_references,
    parse_references,
    read_references,
    sources,
)

OURS = {"Local"}
"""Methods that no paper introduces."""
OTHER_CLASSES = {"LoRA", "ReferenceKnowledge", "StructuralKnowledge", "SharedGenerator", "SoftLabels"}
OTHER_CLASSES |= {"ClassShares", "FeatureStatistics", "UnitRepresentation"}
"""Classes with a source that `fl-lightning list` does not list: parts of models, and shared knowledge."""
KEYS = {"dp_sgd", "mixup", "cutmix", "long_tail"}
"""Keys of a config with a source."""

ENTRY = ["@article{a2020b,", "  title = {On {SGD}},", "  keywords = {FedAvg, FedProx},", "}"]


def test_every_method_has_a_source():
    methods = set(catalogue.classes_of("algorithms"))
    assert methods - set(read_references()) == OURS
    for kind in ("adversaries", "loss_terms"):
        assert set(catalogue.classes_of(kind)) <= set(read_references()), kind


@pytest.mark.parametrize("one", all_references(), ids=lambda one: one.key)
def test_entries_are_complete(one):
    required = {"title", "author", "year", VENUE_FIELDS[one.kind]} | ({"url"} if PACKAGE not in one.names else set())
    assert set(one.fields) == required
    assert one.names
    assert re.fullmatch(r"[a-z]+(19|20)\d\d[a-z0-9]+|fllightning", one.key)
    assert str(one.year) in one.key or one.key == "fllightning"
    assert one.url is None or re.fullmatch(r"https?://\S+", one.url)
    assert one.venue.startswith("arXiv:") == (one.kind == "misc" and "arxiv.org" in (one.url or ""))
    if one.venue.startswith("arXiv:"):
        assert one.url == f"https://arxiv.org/abs/{one.venue.removeprefix('arXiv:')}"
    for value in one.fields.values():
        assert value.count("{") == value.count("}")
    for name in one.fields["author"].split(" and "):
        assert re.fullmatch(r"[^,]+, [^,]+|others|\{.+\}", name), name


def test_the_key_is_the_first_author_and_the_year():
    def plain(name: str) -> str:
        return re.sub(r"[^a-z]", "", name.lower().replace("ý", "y").replace("č", "c").removeprefix("t. "))

    for one in all_references():
        if PACKAGE not in one.names:
            assert one.key.startswith(plain(one.fields["author"].partition(",")[0]) + str(one.year)), one.key


def test_keywords_are_classes_or_keys():
    known = {name for kind in catalogue.BASES for name in catalogue.classes_of(kind)}
    named = {name for one in all_references() for name in one.names}
    assert named - known == OTHER_CLASSES | KEYS | {PACKAGE}
    assert {f"scenario.{key}" if key == "long_tail" else key for key in KEYS} <= options_of("fit").keys()


def test_main_source_is_the_first():
    assert sources("FedDistill")[0] == read_references()["FedDistill"]
    assert [one.year for one in sources("PrivateMean")] == [2018, 2021, 2021]
    assert sources("Local") == []


def test_a_reference_as_text():
    (one,) = parse_references(["% comment", "", *ENTRY])
    assert one.bibtex() == "@article{a2020b,\n  title = {On {SGD}},\n}"
    assert one.title == "On SGD"
    assert one.names == ("FedAvg", "FedProx")
    mcmahan = read_references()["FedAvg"]
    assert mcmahan.authors[0] == "H. Brendan McMahan"
    assert mcmahan.authors[-1] == "Blaise Agüera y Arcas"
    assert read_references()["Deadline"].authors[1] == "others"
    assert read_references()[PACKAGE].authors == ("The fl-lightning authors",)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (["title = {outside},"], 1),
        ([*ENTRY[:2], "  title = {again},", "}"], 3),
        ([ENTRY[0], "  title = no braces,", "}"], 2),
        ([ENTRY[0], "@article{inside,", "}"], 2),
        ([*ENTRY, *ENTRY], 5),
        (ENTRY[:-1], 3),
        ([ENTRY[0], "", *ENTRY[1:]], 2),
    ],
    ids=["outside", "field twice", "no braces", "entry in entry", "key twice", "not closed", "blank line"],
)
def test_other_text_is_refused(lines, number):
    with pytest.raises(ValueError, match=f"line {number}:"):
        parse_references(lines)
