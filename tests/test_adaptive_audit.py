"""An audit attacks with who knows the defence, and says so wherever a number stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from leakgauge import exchanges, report
from leakgauge.audit import Store, parse, read, run
from leakgauge.audit.results import Result
from leakgauge.records import Images
from leakgauge.report import contents, terminal
from leakgauge.types import Batch, LocalTraining, ThreatModel

OWN = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Halve:
    """Halves the update."""

    def announced(self):
        return {"factor": 0.5}

    def on_update(self, update, here, rng):
        return {name: value / 2 for name, value in update.items()}
'''


def plan(folder: Path, *defences: dict[str, Any] | str, **audit: Any) -> Any:
    (folder / "own_halve.py").write_text(OWN)
    table = {
        "federation": {"data": "digits", "model": "mlp", "training": {"lr": 0.1}},
        "attack": [{"name": "analytic"}, {"name": "idlg", "iterations": 5}],
        "defence": list(defences),
        "audit": {"seeds": [0], "gallery": 10, "explain": False, "exact": False} | audit,
    }
    return parse(table, "x", folder)


def audited(folder: Path, *defences: dict[str, Any] | str, **audit: Any) -> Result:
    return run(plan(folder, *defences, **audit), Store(folder / "out"))


def adapted(result: Result) -> dict[tuple[str, str], str | None]:
    return {(row.defence, row.attack): row.measured.adapted for row in result.summary
            if row.measured}  # fmt: skip


def test_rows_say_what_the_attacker_did_who_knows_the_defence(tmp_path: Path) -> None:
    prune, hide = {"name": "prune", "share": 0.5}, {"name": "hide-top", "share": 0.1}
    result = audited(tmp_path, {"name": "none"}, prune, hide, {"name": "own_halve:Halve"})
    found = adapted(result)
    assert found["none", "idlg"] is None
    assert "matches only what was sent" in str(found["prune", "idlg"])
    assert "completes layers" in str(found["prune", "analytic"])  # it reads a restored update
    assert found["hide-top", "analytic"] is None  # nothing is restored
    assert "larger" in str(found["hide-top", "idlg"])
    assert {found["Halve", attack] for attack in ("analytic", "idlg")} == {None}
    rows = {(one.defence, one.attack): one.knows for one in contents.findings(result)}
    assert rows["none", "idlg"] == ""
    assert rows["prune", "idlg"].startswith("knows the defence: matches only")
    assert rows["Halve", "idlg"].startswith("untested")
    for path in report.write(tmp_path / "out", "hide"):
        text = path.read_text("utf-8")
        assert "knows the defence: matches only what was sent" in text
        assert "untested: does not know the defence" in text
    console = Console(width=100, record=True, file=(tmp_path / "said").open("w"))
    console.print(terminal.summary_table(result))
    said = console.export_text()
    assert "analytic (untested)" in said
    assert "untested: this attack does not know the defence" in said


def test_an_audit_can_be_told_to_ignore_the_defence(tmp_path: Path) -> None:
    result = audited(tmp_path, {"name": "prune", "share": 0.5}, adaptive=False)
    assert set(adapted(result).values()) == {None}
    assert result.verdict is not None
    assert result.verdict.outcome in ("leaks", "inconclusive")  # never below the limit


def test_nobody_knows_what_a_defence_leaves_of_a_sum(tmp_path: Path) -> None:
    checked = plan(tmp_path, {"name": "prune", "share": 0.5})
    document = checked.document
    for clients, words in ((1, True), (2, False)):
        federation = replace(document.federation, clients=clients)
        aggregate = replace(document, federation=federation, threat=ThreatModel(actor="aggregate"))
        result = run(replace(checked, document=aggregate), Store(tmp_path / f"out{clients}"))
        assert any(adapted(result).values()) == words


def test_what_an_update_looked_like_is_told_of_what_was_sent(tmp_path: Path) -> None:
    """Completing a pruned layer does not hide that it was pruned."""
    result = audited(tmp_path, {"name": "prune", "share": 0.5})
    trial = next(one for one in result.trials if one.kind == "trial" and one.attack == "idlg")
    assert trial.found is not None
    assert trial.found.sparsity > 0.45  # of a completed update there are hardly any zeros


def test_captured_rounds_with_a_defence_are_untested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "announcednet.py").write_text(
        "from torch import nn\n"
        "def make_model():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import announcednet  # type: ignore[import-not-found]

    model = announcednet.make_model()
    zeros = {name: 0.01 * torch.randn_like(p) for name, p in model.named_parameters()}
    inputs = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for defended in (None, {"norm": 1.0}):
        folder = tmp_path / f"captured-{defended is not None}"
        exchanges.capture(
            folder, model, [zeros], made_by="announcednet:make_model", record=Images((1, 8, 8)),
            classes=("a", "b", "c"), training=LocalTraining(lr=0.1, batch_size=2), sizes=(2,),
            truths=(Batch(inputs, torch.tensor([0, 2])),), announced=defended,
        )  # fmt: skip
        result = run(read(folder), Store(tmp_path / f"out-{defended is not None}"))
        names = {row.defence for row in result.summary}
        assert names == ({"none"} if defended is None else {"announced"})
        assert set(adapted(result).values()) <= {None}
        assert result.verdict is not None
        assert result.verdict.outcome != "below the limit"
