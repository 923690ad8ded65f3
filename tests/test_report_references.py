"""Citations: the papers of what was used, well formed, each method covered."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from sample_result import sample, save

from leakgauge import cli
from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS, LABEL_RULES, FedLeak, InvertingGradients
from leakgauge.attacks._labels import PAPERS as OF_RULES
from leakgauge.audit import references, schema
from leakgauge.config import plain
from leakgauge.defences import DEFENCES, Prune
from leakgauge.errors import InputError
from leakgauge.fl.aggregate import PAPER as FEDERATION
from leakgauge.metrics import METRICS
from leakgauge.papers import FAN2025, Paper

METHODS = {**ATTACKS, **ACTIVE_ATTACKS, **DEFENCES, **METRICS}
EVERY = tuple(
    dict.fromkeys(
        [paper for method in METHODS.values() for paper in getattr(method, "papers", ())]
        + [paper for papers in OF_RULES.values() for paper in papers]
        + [FEDERATION, FAN2025]
    )
)


@pytest.fixture
def result(tmp_path):
    return sample(tmp_path, seeds=1, records=1)


def keys(papers):
    return [paper.key for paper in papers]


def test_every_method_of_a_paper_names_it():
    uncited = {"clip", "psnr", "affine-psnr", "mse"}  # older than any paper worth citing
    for name, method in METHODS.items():
        assert bool(getattr(method, "papers", ())) != (name in uncited), f"papers of {name!r}"
    assert OF_RULES.keys() == LABEL_RULES.keys()
    assert len(set(keys(EVERY))) == len(EVERY)


def test_a_result_cites_what_it_used_and_nothing_else(result):
    assert keys(result.references) == [
        "phong2018",  # analytic
        "geiping2020",  # inverting-gradients
        "ma2023",  # its label rule
        "zhu2019",  # dlg
        "lin2018",  # prune
        "wang2004",  # ssim
        "fan2025",  # the words for a risk
        "mcmahan2017",  # the federation
    ]


def test_the_label_rule_that_was_used_is_cited():
    used = references.of([InvertingGradients(labels="yin"), FedLeak(labels="known"), None, Prune()])
    assert keys(used) == ["geiping2020", "yin2021", "fan2025", "lin2018", "mcmahan2017"]


def test_names_of_an_older_result_become_the_papers_that_are_known(result):
    plan = replace(
        result.plan,
        attack=({"name": "idlg", "labels": "yin"}, {"name": "idlg"}, {"name": "gone"}, {}),
        defence=({"name": "clip-and-noise"}, {"name": "none"}),
        audit=replace(result.plan.audit, metrics=("lpips", "theirs:BLUR")),
    )
    assert keys(references.known(plan, ["exact-recursion", "never heard of"])) == [
        "zhao2020", "yin2021", "zhu2021", "dimitrov2024", "balle2018", "zhang2018", "fan2025",
        "mcmahan2017",
    ]  # fmt: skip


def test_papers_of_methods_that_are_not_installed_are_in_the_file(result, tmp_path, capsys):
    theirs = Paper("they2026", "Doe, Jo", "Theirs", 2026, "Somewhere", "https://example.org/1")
    save(tmp_path, replace(result, references=(theirs,)))
    cli.cite(tmp_path)
    assert capsys.readouterr().out.startswith("@inproceedings{they2026,\n  author = {Doe, Jo},")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"link": "javascript:alert(1)"}, r"references\[0\]: link must be a web address"),
        ({"link": "https://x.org/><script>"}, "link must be a web address"),
        ({"key": "a}b"}, "key must be letters"),
        ({"kind": "poem"}, "'poem' is not a choice"),
        ({"fields": [["pages"]]}, "expected 2 values, got 1"),
        ({"year": "2020"}, "expected a whole number"),
    ],
)
def test_a_paper_of_a_file_cannot_be_anything(result, change, words):
    table = plain(result)
    table["references"][0] |= change
    with pytest.raises(InputError, match=words):
        schema.check(table)


def test_bibtex_is_well_formed():
    text = "\n\n".join(paper.bibtex() for paper in EVERY)
    entries = re.findall(r"@(\w+)\{(\w+),\n(.*?)\n\}", text, re.S)
    assert [key for _, key, _ in entries] == keys(EVERY)
    for kind, _, body in entries:
        for line in body.splitlines():
            name, value = re.fullmatch(r"  (\w+) = \{(.*)\},", line).groups()
            assert value.count("{") == value.count("}")
            assert name.islower()
            assert value == value.strip() != ""
        names = re.findall(r"^  (\w+) =", body, re.M)
        venue = {"article": "journal", "inproceedings": "booktitle", "misc": "howpublished"}[kind]
        assert {"author", "title", "year", venue} <= set(names)
        assert "url" in names or "doi" in names
        assert len(names) == len(set(names))


def test_authors_are_surname_first_in_bibtex_and_last_in_a_line():
    for paper in EVERY:
        for author in paper.author.split(" and "):
            assert re.fullmatch(r"[^,]+, [^,]+", author)
    line = {paper.key: paper.line() for paper in EVERY}
    assert line["geiping2020"] == (
        "Jonas Geiping, Hartmut Bauermeister, Hannah Dröge, Michael Moeller: Inverting Gradients – "
        "How Easy Is It to Break Privacy in Federated Learning? Advances in Neural Information "
        "Processing Systems, 2020."
    )
    assert line["mcmahan2017"].split(":")[0].endswith("Blaise Agüera y Arcas")


def test_a_doi_is_a_link():
    links = {paper.key: paper.link for paper in EVERY}
    assert links["wang2004"] == "https://doi.org/10.1109/TIP.2003.819861"
    assert all(link.startswith("https://") for link in links.values())
