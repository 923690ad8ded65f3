"""Citations: the papers of what was used, well formed, each method covered."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from sample_result import sample

from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS, LABEL_RULES
from leakgauge.defences import DEFENCES
from leakgauge.metrics import METRICS
from leakgauge.report import references


@pytest.fixture
def result(tmp_path):
    return sample(tmp_path, seeds=1, records=1)


def keys(result):
    return [paper.key for paper in references.used(result)]


def test_every_method_of_a_paper_has_its_reference():
    for name in [*ATTACKS, *ACTIVE_ATTACKS, *LABEL_RULES]:
        assert name in references.METHODS, f"name the paper of {name!r} in references.METHODS"
    uncited = {"clip", "psnr", "affine-psnr", "mse"}  # older than any paper worth citing
    for name in [*DEFENCES, *METRICS]:
        assert (name in references.METHODS) != (name in uncited)
    known = {paper.key for paper in references.PAPERS}
    assert {key for cited in references.METHODS.values() for key in cited} == known


def test_label_rules_not_named_in_a_plan_are_the_attacks_defaults():
    defaults = {
        name: field.default
        for name, attack in ATTACKS.items()
        for field in fields(attack)
        if field.name == "labels"
    }
    assert defaults == references.LABEL_RULE


def test_a_result_cites_what_it_used_and_nothing_else(result):
    assert keys(result) == [
        "phong2018",  # analytic
        "zhu2019",  # dlg
        "geiping2020",  # inverting-gradients
        "fan2025",  # the words for a risk
        "ma2023",  # its label rule
        "lin2018",  # prune
        "wang2004",  # ssim
        "mcmahan2017",  # the federation
    ]


def test_options_and_metrics_are_followed(result):
    plan = replace(
        result.plan,
        attack=({"name": "idlg", "labels": "yin"},),
        defence=({"name": "clip-and-noise"},),
        audit=replace(result.plan.audit, metrics=("lpips",)),
    )
    assert keys(replace(result, plan=plan, references=("never heard of",))) == [
        "zhao2020", "yin2021", "fan2025", "balle2018", "zhang2018", "mcmahan2017",
    ]  # fmt: skip


def test_bibtex_is_well_formed(result):
    text = references.bibtex(result)
    entries = re.findall(r"@(\w+)\{(\w+),\n(.*?)\n\}", text, re.S)
    assert [key for _, key, _ in entries] == keys(result)
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
    for paper in references.PAPERS:
        for author in paper.author.split(" and "):
            assert re.fullmatch(r"[^,]+, [^,]+", author)
    line = {paper.key: paper.line() for paper in references.PAPERS}
    assert line["geiping2020"] == (
        "Jonas Geiping, Hartmut Bauermeister, Hannah Dröge, Michael Moeller: Inverting Gradients – "
        "How Easy Is It to Break Privacy in Federated Learning? Advances in Neural Information "
        "Processing Systems, 2020."
    )
    assert line["mcmahan2017"].split(":")[0].endswith("Blaise Agüera y Arcas")


def test_a_doi_is_a_link():
    links = {paper.key: paper.link for paper in references.PAPERS}
    assert links["wang2004"] == "https://doi.org/10.1109/TIP.2003.819861"
    assert all(link.startswith("https://") for link in links.values())
