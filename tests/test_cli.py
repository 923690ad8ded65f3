"""The command line: one clear message and code 2 for what the user can mend, no traceback."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from rich.cells import cell_len
from sample_result import sample

from leakgauge import __version__, audit, catalogue, cli, data, models
from leakgauge.attacks import ATTACKS
from leakgauge.audit import schema
from leakgauge.audit.results import LabelShare, Measured, Row, Spread
from leakgauge.defences import DEFENCES
from leakgauge.errors import NotApplicable, PlanError
from leakgauge.report import terminal
from leakgauge.types import Reconstruction

TINY = """
[federation]
data = "digits"
model = {{ name = "mlp", hidden = [8] }}
{federation}
[[attack]]
name = "analytic"
{attack}
[audit]
seeds = [0]
gallery = 20
explain = false
exact = false
limit = {{ share = 1.0, found = 1.0, labels = 1.0 }}
{audit}
"""


def tiny(federation="", attack="", audit="", more=""):
    return TINY.format(federation=federation, attack=attack, audit=audit) + more


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder to stand in, 80 columns wide, with the path of imports given back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line; its exit code and what it printed."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["leakgauge", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=printed.out, err=printed.err)

    return called


@pytest.fixture
def refused(desk, call):
    """Run a command that must be refused: message, code 2, and the folder as it was."""

    def check(*arguments, words):
        before = {path: path.stat().st_mtime_ns for path in desk.rglob("*")}
        got = call(*arguments)
        assert got.code == 2, got
        assert got.err.startswith("error: ")
        assert got.err.count("error: ") == 1
        assert re.search(words, got.err), got.err
        assert "Traceback" not in got.err + got.out
        assert got.out.strip() == ""
        after = {path: path.stat().st_mtime_ns for path in desk.rglob("*")}
        ours = {path for path in after if "__pycache__" not in path.parts}
        assert {path: after[path] for path in ours} == before
        return got.err

    return check


def table_row(text, attack):
    return next(line for line in text.splitlines() if line.strip().startswith(attack))


# Protocols.

VARIED = "[protocol]\nbatch_size = [1, 8]\n"


def varied():
    """A plan with a protocol, whose limits a control can break."""
    return tiny(more=VARIED).replace("limit = { share = 1.0, found = 1.0, labels = 1.0 }", "")


def test_a_protocol_prints_its_table_and_says_where_its_reports_are(desk, call):
    (desk / "plan.toml").write_text(varied())
    got = call("protocol", "plan.toml", "--out", "out")
    assert got.code == 0, got.err
    assert max(map(cell_len, got.out.partition("› kept")[0].splitlines())) <= 80
    assert "at most 2 audits of 1 trials each" in got.out
    assert re.search(r"Batch size\s+1 +over 50 dB .*\s+› 8 ", got.out)
    for name in ("protocol.json", "protocol.html", "protocol.md"):
        assert f"out/{name}" in got.out
        assert (desk / "out" / name).exists()
    before = (desk / "out" / "protocol.html").read_text()
    again = call("protocol", "plan.toml", "--out", "out", "--resume")
    assert again.code == 0
    sums = re.compile("<dd>.*?</dd>")  # of the file and its times
    assert sums.sub("", (desk / "out" / "protocol.html").read_text()) == sums.sub("", before)
    assert call("protocol", "plan.toml", "--out", "out", "--overwrite").code == 0


def test_a_check_of_a_protocol_counts_its_audits_and_tries_its_values(desk, call):
    plan = desk / "plan.toml"
    plan.write_text(varied())
    assert "[protocol], besides: at most 2 audits of 1 trials each" in call("check", plan).out
    plan.write_text(varied() + 'defence = ["prun"]\n')
    got = call("check", plan)
    assert got.code == 2
    assert "protocol.defence[0]" in got.err


def test_a_protocol_that_ran_out_of_time_is_no_success(desk, call):
    (desk / "plan.toml").write_text(varied())
    got = call("protocol", "plan.toml", "--out", "out", "--budget", "0.000001s")
    assert got.code == 4
    assert "--resume continues" in got.err
    assert call("protocol", "plan.toml", "--out", "out", "--resume").code == 0


def test_a_wrong_protocol_is_refused(desk, refused):
    plan = desk / "plan.toml"
    plan.write_text(tiny())
    refused("protocol", plan, words=r"has no \[protocol\]")
    plan.write_text(tiny(more="[protocol]\nbatchsize = [1]"))
    refused("protocol", plan, words="did you mean 'batch_size'")
    plan.write_text(tiny(more=VARIED))
    refused("audit", plan, words="run `leakgauge protocol`")
    refused("protocol", plan, "--resume", "--overwrite", words="either --resume or --overwrite")
    (desk / "full").mkdir()
    (desk / "full" / "file").write_text("")
    refused("protocol", plan, "--out", "full", words="is not empty and holds no audit")


# Audits that run.


def test_an_audit_prints_the_medians_of_its_result(desk, call):
    more = '[[attack]]\nname = "inverting-gradients"\niterations = 2\n[[defence]]\nname = "none"\n'
    plan = desk / "my plan[red].toml"
    plan.write_text(
        tiny(audit='metrics = ["psnr", "ssim"]', more=f'{more}[[defence]]\nname="clip"')
    )
    got = call("audit", plan, "--out", "out[bold]")
    assert got.code == 0, got.err
    assert got.err == ""
    assert max(map(cell_len, got.out.splitlines())) <= 80
    result = schema.load(desk / "out[bold]" / "result.json")
    assert len(result.summary) == 4 + 2
    leaks, others = (re.split(r"\n clip ", part) for part in got.out.split("Other metrics", 1))
    for row in result.summary:
        defended, found = row.defence == "clip", row.measured
        if row.attack.endswith("-blind"):  # below the attack that knows the defence
            assert leaks[defended].count("ignoring it  ") == 2
            continue
        printed = table_row(leaks[defended], row.attack)
        assert f" {found.scores['psnr'].median:.1f} (" in printed
        assert f" {found.mean_image['psnr']:.1f} " in printed
        assert f" {found.scores['identified'].mean:.0%} " in printed
        if found.labels:
            assert f" {found.labels.accuracy:.0%} (" in printed
        ssim = table_row(others[defended], row.attack)
        assert f" {found.scores['ssim'].median:.3g} ({found.mean_image['ssim']:.3g})" in ssim
    assert "What leaks: my plan[red]" in got.out
    assert "out[bold]/result.json" in got.out  # brackets in a name are no markup


def row(psnr=None, baseline=0.0, records=6, **more):
    measured = psnr and Measured(
        realism="realistic",
        records=records,
        scores={
            "psnr": Spread(psnr, psnr, (psnr - 2, psnr + 3), (psnr, psnr), psnr, psnr, records),
            "identified": Spread(0.5, 0.5, (0.5, 0.5), (0.5, 0.5), 0.5, 0.5, records),
        },
        mean_image={"psnr": baseline},
        random_image={"psnr": baseline},
        identified=0.1,
        labels=LabelShare(1.0, 0.1, 0.1),
        leaks={},
        success_rate=1.0,
        risk="very high",
        worst_risk="very high",
        caveats=(),
    )
    given = {"round": 0, "defence": "none", "attack": "inverting-gradients", "trials": 2,
             "failed": 0, "not_applicable": 0, "unscored": 0, "reason": None}  # fmt: skip
    return Row(**(given | more), measured=measured)


def shown(folder, *rows):
    whole = sample(folder / "audit", attacks=("analytic",), seeds=1, records=1)
    with cli.console.capture() as capture:
        result = replace(whole, summary=rows, metrics=whole.metrics[:1])
        cli.console.print(terminal.summary_table(result))
    return capture.get()


def test_a_risk_is_named_only_above_the_baseline(desk):
    assert table_row(shown(desk, row(21.0, 20.0)), "inverting").endswith("very high ")
    printed = table_row(shown(desk, row(21.0, 21.0)), "inverting")
    assert printed.split() == [
        "inverting-gradients", "21.0", "(19–24)", "21.0", "50%", "100%", "(10%)", "–",
    ]  # fmt: skip


def test_a_table_of_several_stages_names_them(desk):
    text = shown(
        desk,
        row(12.0, 10.0),
        row(11.0, 10.0, round=20),
        row(11.0, 10.0, round=20, defence="clip-and-noise", records=4),
    )
    sections = [line.strip() for line in text.splitlines() if line.strip().startswith("round")]
    assert sections == ["round 0, no defence", "round 20, no defence", "round 20, clip-and-noise"]
    assert "median over 4 to 6" in text


def test_a_row_without_scores_says_why(desk):
    for count, words in (("failed", "failed "), ("unscored", "not scored "), ("trials", "n/a ")):
        assert table_row(shown(desk, row(attack="dlg", **{count: 2})), "dlg").endswith(words)


def test_the_demo_is_the_embedded_plan(desk, call, monkeypatch):
    caught = []

    def instead(plan, store, **options):
        caught.append((plan, store, options))
        raise PlanError("enough seen")

    monkeypatch.setattr(audit, "run", instead)
    assert call("audit", "--demo", "--overwrite").code == 2
    ((plan, store, options),) = caught
    assert (plan.name, plan.data.name) == ("demo", "photos")
    assert store.out == Path("leakgauge-audit/demo")
    assert (options["resume"], options["overwrite"]) == (False, True)


def test_resume_continues_and_overwrite_replaces(desk, call, refused):
    (desk / "plan.toml").write_text(tiny())
    assert call("audit", "plan.toml").code == 0
    result = desk / "leakgauge-audit" / "plan" / "result.json"
    first = result.read_bytes()
    refused("audit", "plan.toml", words="--resume.*--overwrite")
    refused("audit", "plan.toml", "--resume", "--overwrite", words="either --resume or --overwrite")
    assert call("audit", "plan.toml", "--resume").code == 0
    trials = [json.loads(text)["trials"] for text in (first, result.read_bytes())]
    assert trials[0] == trials[1]  # nothing ran again, not even the clock
    (desk / "plan.toml").write_text(tiny(federation="clients = 2"))
    refused("audit", "plan.toml", "--resume", words="different plan")
    assert call("audit", "plan.toml", "--overwrite").code == 0
    assert result.read_bytes() != first


@pytest.fixture
def instead(monkeypatch):
    """Put a function of what is seen in the place of the analytic attack."""

    def put(todo):
        methods = {
            "needs": frozenset(),
            "reconstruct": lambda self, seen, rng, resources=None: todo(seen),
        }
        monkeypatch.setitem(ATTACKS, "analytic", make_dataclass("Stub", [], namespace=methods))

    return put


def test_a_crash_of_an_attack_is_code_3_and_the_result_is_there(desk, call, instead):
    instead(lambda seen: 1 / 0)
    (desk / "plan.toml").write_text(tiny(audit="control = false"))
    got = call("audit", "plan.toml")
    assert got.code == 3
    assert got.err.startswith("error: 1 of 1 trials failed")
    assert "Traceback" not in got.err + got.out
    assert "analytic: ZeroDivisionError" in got.out
    result = json.loads((desk / "leakgauge-audit" / "plan" / "result.json").read_text())
    assert result["trials"][0]["status"] == "failed"


def test_an_interrupt_says_how_to_go_on(desk, call, instead):
    def interrupt(seen):
        raise KeyboardInterrupt

    instead(interrupt)
    (desk / "plan.toml").write_text(tiny())
    got = call("audit", "plan.toml")
    assert got.code == 130
    assert "--resume" in got.err
    assert "Traceback" not in got.err


def test_notes_are_told_once_and_not_without_end(desk, call, instead):
    def talkative(seen):
        notes = ("always the same [sic]", *(f"number {i}" for i in range(20)))
        return Reconstruction(torch.zeros(1, 1, 8, 8), None, 0.0, notes=notes)

    instead(talkative)
    plan = tiny(audit="control = false").replace("seeds = [0]", "seeds = [0, 1]")
    (desk / "plan.toml").write_text(plan)
    got = call("audit", "plan.toml")
    assert got.out.count("note: analytic: always the same [sic] (2 trials)") == 1
    assert got.out.count("note:") == 9
    assert "13 more notes are in the result" in got.out


# Audits that are refused.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (tiny(federation="clinets = 2"), "plan.federation: unknown key 'clinets'.*'clients'"),
        (tiny(attack="tolerence = 1"), "attack 'analytic': unknown key 'tolerence'.*'tolerance'"),
        (tiny(more='[threat]\ngrants = []'), "needs 'records'.*threat.grants"),
        ("[federation\n", "not valid TOML"),
        (tiny(federation="training = { batch_size = 2000 }"), "batch_size 2000.*has only 1797"),
        (tiny(federation="rounds = [2]\ntraining = { lr = 1e30 }"), "NaN.*Lower the learning rate"),
        (tiny(federation='checkpoint = "no.pt"'), "no file of weights at .*no.pt"),
        (tiny(federation='partition = "dirichle"'), "did you mean 'dirichlet'"),
        (tiny(audit='metrics = ["lpips"]'), "LPIPS needs its weights"),
        (tiny(more='[threat]\nclient = 5'), "threat.client is 5"),
        (tiny(audit='device = "cuda:99"'), "device 'cuda:99'"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_in_words(desk, refused, monkeypatch, text, words):
    monkeypatch.setenv("LEAKGAUGE_WEIGHTS", str(desk / "none"))
    (desk / "plan.toml").write_text(text)
    refused("audit", "plan.toml", words=words)


def test_a_plan_or_the_demo(refused):
    refused("audit", words="either the path of a plan or --demo")
    refused("audit", "x.toml", "--demo", words="either the path of a plan or --demo")
    refused("audit", "x.toml", words="no plan at x.toml")


def test_an_output_that_cannot_be_written(desk, refused):
    (desk / "plan.toml").write_text(tiny())
    (desk / "file").write_text("mine")
    refused("audit", "plan.toml", "--out", "file", words="file is a file")
    refused("audit", "plan.toml", "--out", "file/below", words="file is a file")
    (desk / "own").mkdir()
    (desk / "own" / "thesis.tex").write_text("mine")
    refused("audit", "plan.toml", "--out", "own", "--overwrite", words="holds no audit")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_truncated_checkpoint_is_refused(desk, refused, suffix):
    model = models.make("mlp", shape=(1, 8, 8), classes=10, hidden=[8], rng=torch.Generator())
    models.save(model, desk / "w.safetensors")
    torch.save(model.state_dict(), desk / "w.pt")
    path = desk / f"w.{suffix}"
    (desk / "plan.toml").write_text(tiny(federation=f'checkpoint = "{path.name}"'))
    whole = path.read_bytes()
    for keep in (len(whole) // 2, len(whole) - 1, 0):
        path.write_bytes(whole[:keep])
        refused("audit", "plan.toml", words=f"w.{suffix}.*(truncated|could run code)")


class Malice:
    def __reduce__(self):
        return (os.mkdir, ("owned",))


@pytest.mark.parametrize("dump", [torch.save, lambda value, path: path.write_bytes(value)])
def test_a_malicious_checkpoint_runs_nothing(desk, refused, dump):
    content = {"fc1.weight": Malice()}
    dump(content if dump is torch.save else pickle.dumps(content, protocol=2), desk / "w.pt")
    (desk / "plan.toml").write_text(tiny(federation='checkpoint = "w.pt"'))
    refused("audit", "plan.toml", words="could run code: refused")
    assert not (desk / "owned").exists()
    pickle.loads(pickle.dumps(Malice()))  # the bait was live
    assert (desk / "owned").exists()


OWN = """
import torch
from torch import nn

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
    def forward(self, x):
        logits = self.fc(x.flatten(1))
        return logits + 0 * torch.sqrt(0 * logits)      # the slope of a root at 0

def nan_gradient():
    return Broken()

def log_softmax():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.LogSoftmax(1))

def conv_head():
    return nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())

def wrong_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))

def crash():
    raise OSError("weights on a tape")
"""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nan_gradient", "'fc.weight' holds 640 NaN or infinite values"),
        ("log_softmax", "End the model in nn.Linear"),
        ("conv_head", "End the model in nn.Linear"),
        ("wrong_classes", r"logits \(2, 10\)"),
        ("crash", "weights on a tape"),
        ("nothing", "expected a callable nothing"),
    ],
)
def test_an_own_model_that_will_not_do_is_refused(desk, refused, model, words):
    (desk / "model.py").write_text(OWN)
    text = tiny().replace('{ name = "mlp", hidden = [8] }', f'"model:{model}"')
    (desk / "plan.toml").write_text(text.replace('"analytic"', '"inverting-gradients"'))
    refused("audit", "plan.toml", words=words)


def test_an_own_model_the_package_has_never_seen_is_audited(desk, call):
    (desk / "model.py").write_text(
        "from torch import nn\n"
        "def make(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    (desk / "plan.toml").write_text(
        tiny().replace('{ name = "mlp", hidden = [8] }', '"model:make"')
    )
    assert call("audit", "plan.toml").code == 0
    result = schema.load(desk / "leakgauge-audit" / "plan" / "result.json")
    # One record and a linear layer with a bias: the record itself, to the last digits.
    assert result.summary[0].measured.scores["psnr"].median > 100


@dataclass(frozen=True)
class Lossy:
    """A defence that forgets a parameter, or half of one."""

    forgets: Literal["parameter", "half"] = "half"

    def announced(self):
        return {}

    def on_update(self, update, here, rng):
        if self.forgets == "parameter":
            return {name: value for name, value in update.items() if name != "fc1.bias"}
        return update | {"fc1.weight": update["fc1.weight"][:4]}


@pytest.mark.parametrize(
    ("forgets", "words"),
    [
        ("parameter", "no entry for parameter 'fc1.bias'"),
        ("half", r"'fc1.weight' has shape \(4, 64\), the model's parameter has \(8, 64\)"),
    ],
)
def test_an_update_of_another_model_is_refused(desk, refused, monkeypatch, forgets, words):
    monkeypatch.setitem(DEFENCES, "lossy", Lossy)
    defence = f'[[defence]]\nname = "lossy"\nforgets = "{forgets}"'
    (desk / "plan.toml").write_text(tiny(more=defence))
    refused("audit", "plan.toml", words=words)


def test_nothing_applies(desk, refused, instead):
    def refuse(seen):
        raise NotApplicable("no [wings]")

    instead(refuse)
    (desk / "plan.toml").write_text(tiny())
    refused("audit", "plan.toml", words=r"no attack of the plan applies.*analytic: no \[wings\]")


def test_the_real_program_says_one_thing_and_exits(desk):
    (desk / "w.pt").write_bytes(pickle.dumps(Malice(), protocol=4))  # torch warns of this one
    (desk / "plan.toml").write_text(tiny(federation='checkpoint = "w.pt"'))
    got = subprocess.run(
        [sys.executable, "-m", "leakgauge.cli", "audit", "plan.toml"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert got.returncode == 2
    assert re.fullmatch(r"error: .*w\.pt .*could run code: refused.*\n", got.stderr)
    assert got.stdout.strip() == ""
    assert sorted(path.name for path in desk.iterdir()) == ["plan.toml", "w.pt"]


# Lists and help.


def test_the_version(call):
    assert call("--version").out == f"leakgauge {__version__}\n"


@pytest.mark.parametrize("kind", catalogue.KINDS)
def test_each_list_has_one_line_per_method(desk, call, kind):
    got = call("list", kind)
    assert got.code == 0
    title, *lines = got.out.rstrip().splitlines()
    assert title == f"{kind}: {catalogue.KINDS[kind].about}"
    assert [line.split()[0] for line in lines] == [e.name for e in catalogue.entries(kind)]
    assert all(line.rstrip().endswith((".", "?")) for line in lines)  # nothing was cut off
    assert max(map(cell_len, got.out.splitlines())) <= 80


def test_the_long_list_shows_options_with_their_defaults(desk, call):
    words = " ".join(call("list", "attacks", "--long").out.split())
    assert 'iterations=500, restarts=1, start="normal"' in words
    assert "https://arxiv.org/abs/1906.08935" in words
    models_ = " ".join(call("list", "models", "--long").out.split())
    assert 'hidden=[256], activation="relu"' in models_
    assert "shape" not in models_  # what the audit itself gives
    assert "partial" not in models_
    assert 'split="train", root' in call("list", "data", "--long").out


def test_all_about_one_method(desk, call):
    got = call("list", "fedleak")  # an attack, and a rule that reads labels
    assert [line for line in got.out.splitlines() if line.startswith("labels: ")]
    words = " ".join(got.out.split())
    assert "M. Fan, F. Wang, C. Chen, J. Zhou" in words
    assert 'variant="short"' in words
    assert "dlg" not in words
    assert max(map(cell_len, got.out.splitlines())) <= 80


def test_a_list_of_all(desk, call):
    got = call("list")
    for kind in catalogue.KINDS:
        assert re.search(rf"^{kind}: ", got.out, re.MULTILINE)
        for entry in catalogue.entries(kind):
            assert f" {entry.name} " in got.out


def test_an_unknown_name_is_refused(refused):
    refused("list", "atacks", words="unknown name 'atacks'; did you mean 'attacks'")
    refused("list", "resnet-19", words=r"did you mean 'resnet-\d+'")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["audit", "list", "data", "--version"]),
        (["audit"], ["PLAN", "TOML", "--demo", "--out", "--resume", "--overwrite", "trust"]),
        (["protocol"], ["PLAN", "--out", "--resume", "--overwrite", "--jobs", "--budget", "weak"]),
        (["list"], ["attacks", "defences", "partitions", "initialisations", "detectors"]),
        (["data", "fetch"], ["cifar10", "fashion-mnist", "--into", "--source", "LEAKGAUGE_DATA"]),
    ],
)
def test_help_can_be_read(desk, call, command, words):
    got = call(*command, "--help")
    assert got.code == 0
    for word in words:
        assert word in got.out
    assert max(map(cell_len, got.out.splitlines())) <= 80


def test_no_command_is_help(call):
    got = call()
    assert "audit" in got.out + got.err
    assert "Traceback" not in got.out + got.err


# Fetching.


@pytest.fixture
def mirror():
    """A server on this machine that answers every request with other bytes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = b"<html>please log in</html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def failed_fetch(got, into):
    assert got.code == 2
    assert got.err.startswith("error: ")
    assert "Traceback" not in got.err + got.out
    assert not (into / "MNIST").exists()


def test_a_fetch_of_something_else_is_refused(desk, call, mirror):
    got = call("data", "fetch", "mnist", "--into", desk, "--source", mirror)
    failed_fetch(got, desk)
    assert re.search(r"expected 9912422 bytes, got 26", got.err)


def test_a_fetch_of_another_file_of_that_size_is_refused(desk, call, mirror, monkeypatch):
    remote = data.fetch.REMOTES["mnist"]
    file = data.fetch.File(remote.files[0].name, 26, remote.files[0].sha256)
    small = data.fetch.Remote(remote.home, remote.folder, (file,))
    monkeypatch.setitem(data.fetch.REMOTES, "mnist", small)
    got = call("data", "fetch", "mnist", "--into", desk, "--source", mirror)
    failed_fetch(got, desk)
    assert f"expected sha256 {file.sha256}" in got.err


def test_a_fetch_without_a_network_says_what_to_place_where(desk, call):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        got = call("data", "fetch", "mnist", "--into", desk, "--source", nobody)
    failed_fetch(got, desk)
    assert f"By hand: place these files in {desk}/MNIST/raw" in got.err
    assert got.err.count("sha256") == 4


def test_what_is_there_is_not_fetched_again(desk, call):
    folder = desk / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for file in data.fetch.REMOTES["mnist"].files:
        (folder / file.name).touch()
    got = call("data", "fetch", "mnist", "--into", desk)
    assert got.code == 0
    assert f"mnist is in {folder}" in got.out


def test_a_fetch_of_an_unknown_set_names_the_known(desk, call):
    got = call("data", "fetch", "cifar11")
    assert got.code == 2
    assert "cifar10" in got.err
    assert "Traceback" not in got.err
