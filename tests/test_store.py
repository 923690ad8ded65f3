"""The folder of an audit: whole files only, and nothing of the user's is ever lost."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from leakgauge.audit import Store
from leakgauge.audit.document import Document, Federation
from leakgauge.audit.results import Times, Trial
from leakgauge.config import plain
from leakgauge.errors import PlanError
from leakgauge.files import write_atomic, write_json

PLAN = Document(Federation("mlp", "digits"), ({"name": "analytic"},))


def tree(folder):
    """Every path below with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def trial(id_="one"):
    """A trial that a folder may hold."""
    return Trial(
        id_, "trial", 0, "none", "analytic", 0, "realistic", "failed", "it broke", Times(1.0, 1.0)
    )


def written(id_="one", **more):
    """It as a file holds it."""
    return json.dumps(plain(trial(id_)) | more)


def opened(out, fingerprint="f", *, resume=False, overwrite=False, plan=PLAN):
    store = Store(out)
    store.open(plan, fingerprint, resume=resume, overwrite=overwrite)
    return store


@pytest.fixture
def audited(tmp_path):
    """The folder of an audit with one trial, an image and a result."""
    store = opened(tmp_path / "out")
    store.keep(trial(), [("images/one/sheet.png", b"png")])
    write_json(store.result, {"schema": 1})
    return store.out


# Files.


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "deep" / "er" / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert tree(tmp_path / "deep" / "er") == {"file": b"new"}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(PlanError, match="file cannot be written: No space left"):
        write_atomic(path, b"new")
    assert tree(tmp_path) == {"file": b"old"}


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert tree(tmp_path) == {"file": b"old"}


def test_the_content_is_on_disk_before_it_has_the_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))

    def renamed(source, target):
        order.append(f"replace {os.path.getsize(source)}")
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    write_atomic(tmp_path / "file", b"12345")
    assert order == ["fsync", "replace 5"]


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    write_atomic(tmp_path / "ours", b"")
    (tmp_path / "other").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "other")]
    assert modes[0] == modes[1]


def test_json_is_text_that_a_person_can_read(tmp_path):
    write_json(tmp_path / "x.json", {"réseau": [1.5, None]})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"réseau": [1.5, None]}
    assert "réseau" in text
    assert text.endswith("}\n")


def test_json_without_a_meaning_is_refused_and_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"psnr": float("nan")})
    assert tree(tmp_path) == {}


# Folders.


def test_nothing_is_written_before_the_first_trial(tmp_path):
    store = opened(tmp_path / "out")
    assert tree(tmp_path) == {}
    store.keep(trial())
    assert sorted(tree(tmp_path / "out")) == ["plan.json", "trials", "trials/one.json"]
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == {
        "fingerprint": "f",
        "plan": plain(PLAN),
    }


def test_a_trial_counts_only_after_its_pictures(tmp_path):
    def pictures():
        yield "images/one/sheet.png", b"png"
        raise KeyboardInterrupt

    store = opened(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.keep(trial(), pictures())
    assert (tmp_path / "images" / "one" / "sheet.png").read_bytes() == b"png"
    assert not (tmp_path / "trials").exists()


def test_a_trial_is_read_back(tmp_path):
    opened(tmp_path).keep(trial())
    again, said = opened(tmp_path, resume=True), []
    assert again.done("one", said.append) == trial()
    assert again.done("two", said.append) is None
    assert said == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"id": "on', "Unterminated string"),
        ("[" * 10**5, "recursion"),
        (b"\xff", "codec can't decode"),
        ("[]", "expected a table"),
        (written("two"), "trial.id: expected 'one', got 'two'"),
        (written(status="well"), "trial.status: 'well' is not a choice"),
        (written(status="done"), "trial: found: expected a table where status is 'done'"),
        (written(seed=[0]), "trial.seed: expected a whole number"),
        (written(error="\ud800"), "trial.error: expected text"),
        (written(fingerprint="g"), "it is of another plan"),
        (written(), "it is of another plan"),
    ],
)
def test_what_is_not_surely_a_trial_of_this_plan_is_said_and_not_used(tmp_path, content, words):
    opened(tmp_path).keep(trial())
    path, said = tmp_path / "trials" / "one.json", []
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert opened(tmp_path, resume=True).done("one", said.append) is None
    assert len(said) == 1
    assert said[0].startswith(f"{path} is not used, its trial is run again: ")
    assert words in said[0]


def test_a_trial_that_never_ends_is_not_read(tmp_path):
    store, said = opened(tmp_path), []
    store.keep(trial())
    (tmp_path / "trials" / "one.json").unlink()
    os.mkfifo(tmp_path / "trials" / "one.json")
    assert opened(tmp_path, resume=True).done("one", said.append) is None
    assert "a pipe" in said[0]


# One audit at a time.

HOLD = """
import sys, time
from pathlib import Path
from leakgauge.audit.store import Store
with Store(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_holder_however_it_ends(tmp_path):
    out = tmp_path / "new" / "out"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(PlanError, match=rf"in use by another audit \(process {holder.pid} on "),
            Store(out).locked(),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert (out / ".lock").exists()
    store = opened(out)  # what the kill left is no obstacle
    with store.locked():
        assert store._fingerprint == "f"
    assert not (out / ".lock").exists()


def test_a_lock_leaves_nothing_unless_something_was_written(tmp_path):
    out = tmp_path / "new" / "out"
    with Store(out).locked():
        assert (out / ".lock").exists()
    assert tree(tmp_path) == {}
    store = opened(out)
    with store.locked():
        store.keep(trial())
    assert sorted(tree(out)) == ["plan.json", "trials", "trials/one.json"]


def test_an_audit_is_not_touched_unless_asked(audited):
    before = tree(audited)
    with pytest.raises(PlanError, match=r"--resume.*--overwrite.*--out"):
        opened(audited)
    with pytest.raises(PlanError, match=r"different plan.*--out.*--overwrite"):
        opened(audited, "g", resume=True)
    assert tree(audited) == before


def test_an_audit_goes_on_with_the_metrics_that_it_began_with(audited):
    """LPIPS may be measured on one machine and not on another: they are not mixed."""
    more = replace(PLAN, audit=replace(PLAN.audit, metrics=("psnr", "lpips")))
    with pytest.raises(
        PlanError,
        match=r"It measures psnr, affine-psnr, ssim, mse, this plan here measures psnr, lpips; "
        r"LPIPS is measured where its file of weights is found: name another folder",
    ):
        opened(audited, "g", resume=True, plan=more)
    with pytest.raises(PlanError, match=r"another version\): name"):
        opened(audited, "g", resume=True)


def test_overwrite_replaces_the_audit_with_its_first_trial_and_not_before(audited):
    (audited / "notes.txt").write_text("mine")
    before = tree(audited)
    store = opened(audited, "g", overwrite=True)
    assert store.done("one") is None  # though its file is still there
    assert tree(audited) == before
    store.keep(trial("two"))
    after = tree(audited)
    assert sorted(after) == ["notes.txt", "plan.json", "trials", "trials/two.json"]
    assert json.loads(after["plan.json"])["fingerprint"] == "g"
    store.keep(trial("three"))
    assert store.done("two") == trial("two")


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize(
    "files",
    [
        {"images/holiday.png": b"mine"},
        {"plan.json": b'{"name": "a plan of something else"}', "images/holiday.png": b"mine"},
        {"plan.json": b"[]", "trials/paper.txt": b"mine"},
        {"plan.json": b'{"fingerprint": "half', "result.json": b"{}"},
        {"plan.json": b"\xff"},
    ],
)
def test_a_folder_that_is_not_surely_an_audit_is_refused(tmp_path, flags, files):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    before = tree(tmp_path)
    with pytest.raises(PlanError, match="name another"):
        opened(tmp_path, **flags)
    assert tree(tmp_path) == before


def test_an_empty_folder_will_do(tmp_path):
    opened(tmp_path).keep(trial())
    assert (tmp_path / "trials" / "one.json").exists()


def test_a_file_will_not_do(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(PlanError, match="is a file"):
        opened(tmp_path / "out")
    with pytest.raises(PlanError, match="out is a file"):
        opened(tmp_path / "out" / "below" / "deeper")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    asked = []

    def denied(path, mode):
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", denied)
    with pytest.raises(PlanError, match=r"may not write to .*--out"):
        opened(tmp_path / "new" / "out")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
