"""Models as users bring them: each is audited, or refused in a sentence before anything is run."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nouns import setting
from torch import Tensor, nn

from leakgauge import audit, cli, data, models
from leakgauge.errors import InputError
from leakgauge.fl import Scenario, simulate
from leakgauge.fl.local import train
from leakgauge.types import Batch, LocalTraining

MODELS = """
import torch
from torch import nn


def body(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *layers, nn.ReLU(), nn.Linear(16, 10))


class Wrapped(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.body, self.change = body(), change

    def forward(self, x):
        return self.change(self.body(x))


class Deep(Wrapped):
    def forward(self, x):
        with torch.no_grad():
            return self.body(x)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu().detach())


def norm(): return body(nn.BatchNorm1d(16))
def scripted(): return torch.jit.script(body())
def inside(): return nn.Sequential(torch.jit.script(body()), nn.Identity())
def number(): return 3
def kind(): return nn.Linear
def pair(): return Wrapped(lambda out: (out, out))
def table(): return Wrapped(lambda out: {"logits": out})
def double(): return body().double()
def half(): return body().bfloat16()
def meta(): return body().to("meta")
def flat(): return Wrapped(lambda out: out.flatten())
def detached(): return Wrapped(lambda out: out.detach())
def switched_off(): return Deep(None)
def cut(): return Half()
def frozen(): return body().requires_grad_(False)
def training_only(): return Wrapped(lambda out: out if not torch.is_grad_enabled() else out / "a")
def leaves(): return Wrapped(lambda out: out if not torch.is_grad_enabled() else exit(0))
def old_norm():
    model = body()
    nn.utils.weight_norm(model[1])
    return model
def compiled(): return torch.compile(body())
def partly(): return nn.Sequential(torch.compile(body()), nn.Identity())


ONE = body()
def one(): return ONE
"""

PLAN = """
[federation]
data = "digits"
model = "own:{model}"
{federation}
[[attack]]
name = "analytic"
[audit]
seeds = [0, 1]
gallery = 20
explain = false
limit = {{ share = 1.0 }}
"""


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Audit a model of MODELS by the command line: code, what was printed, whether it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    Path("own.py").write_text(MODELS, encoding="utf-8")

    def run(model: str, federation: str = "") -> SimpleNamespace:
        Path("plan.toml").write_text(PLAN.format(model=model, federation=federation))
        monkeypatch.setattr(sys, "argv", ["leakgauge", "audit", "plan.toml", "--out", "out"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        text = " ".join((printed.out + printed.err).split())
        return SimpleNamespace(code=end.value.code or 0, text=text, wrote=Path("out").exists())

    return run


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("norm", "needs more than one value per channel: raise batch_size"),
        ("scripted", "gave a scripted model (torch.jit)"),
        ("inside", "gave a scripted model (torch.jit, at '0')"),
        ("number", "gave a int, expected an nn.Module"),
        ("kind", "gave a type, expected an nn.Module"),
        ("pair", "gave a tuple. Expected images (2, 1, 8, 8) -> logits (2, 10)"),
        ("table", "gave a dict. Expected images"),
        ("flat", "gave (20,). Expected images"),
        ("double", "is torch.float64 on cpu. Expected torch.float32 on the CPU"),
        ("half", "is torch.bfloat16 on cpu"),
        ("meta", "on meta. Expected torch.float32 on the CPU"),
        ("detached", "of which no trained parameter has a gradient"),
        ("switched_off", "of which no trained parameter has a gradient"),
        ("frozen", "no trainable parameter"),
        ("training_only", "in local training on a batch of 1, failed (TypeError"),
        ("leaves", "in local training on a batch of 1, failed (SystemExit: 0)"),
        ("old_norm", "copy.deepcopy cannot copy"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_audited_is_refused_in_a_sentence(
    audited: Any, model: str, words: str
) -> None:
    found = audited(model)
    assert found.code == 2
    assert words in found.text
    assert "Traceback" not in found.text
    assert not found.wrote


@pytest.mark.parametrize(
    ("model", "federation"),
    [
        ("norm", "training = { batch_size = 2 }"),
        ("norm", 'training = { batch_norm = "eval" }'),
        ("compiled", ""),
        ("partly", ""),
        ("one", ""),
        ("cut", ""),
    ],
)
def test_a_model_that_can_be_audited_is(audited: Any, model: str, federation: str) -> None:
    found = audited(model, federation)
    assert found.code in (0, 1, 4), found.text  # a verdict, whatever it is
    assert found.wrote


def test_a_last_batch_of_one_record_is_noticed_before_the_run(audited: Any) -> None:
    federation = "records = 5\ntraining = { batch_size = 2, epochs = 1 }"
    found = audited("norm", federation)
    assert found.code == 2
    assert "on a batch of 1, failed" in found.text
    assert not found.wrote


@pytest.mark.parametrize(
    "federation", ["", "records = 5\ntraining = { batch_size = 2, epochs = 1 }"]
)
def test_a_run_without_a_forecast_refuses_before_its_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: str
) -> None:
    """The known-weak twin would come first, and has batch norm in eval mode."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(MODELS, encoding="utf-8")
    table = tomllib.loads(PLAN.format(model="norm", federation=federation))
    plan = audit.parse(table, "plan", tmp_path)
    with pytest.raises(InputError, match="on a batch of 1, failed"):
        audit.run(plan, audit.Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- the same by the library


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *layers, nn.ReLU(), nn.Linear(16, 10))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Pair, "gave a tuple. Expected logits, a tensor"),
        (lambda: 3, r"make_model\(\) gave a int, expected an nn.Module"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), r"\(1, 4\).*at least 10 classes"),
        (lambda: nn.Sequential(nn.Linear(8, 10)), "gave a tensor"),
        (lambda: network().double(), "end your function with model.float"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), r"lazy '1\.weight' has no size"),
        (lambda: network(nn.BatchNorm1d(16)), 'or set batch_norm = "eval"'),
    ],
)
def test_a_scenario_refuses_them_too(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(Scenario(make, data.load("digits")), torch.Generator().manual_seed(0))


def test_training_says_what_a_model_lacks() -> None:
    batch = Batch(torch.rand(1, 1, 8, 8), torch.tensor([3]))
    rng = torch.Generator().manual_seed(0)
    with pytest.raises(InputError, match="no trainable parameter"):
        train(setting(network().requires_grad_(False), batch), batch, LocalTraining(), rng)
    with pytest.raises(InputError, match="more than one value per channel"):
        train(setting(network(nn.BatchNorm1d(16)), batch), batch, LocalTraining(), rng)


def test_a_model_that_is_the_same_object_every_time_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trials or a client and a guard would share its weights; the user's own stays as it is."""
    (tmp_path / "single.py").write_text(
        "from torch import nn\nONE = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "def make(): return ONE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import single  # type: ignore[import-not-found]

    before = {name: value.clone() for name, value in single.ONE.state_dict().items()}

    def made(seed: int, init: str) -> nn.Module:
        rng = torch.Generator().manual_seed(seed)
        return models.make("single:make", shape=(1, 8, 8), classes=10, init=init, rng=rng)

    first, second = made(0, "wide-uniform"), made(1, "wide-uniform")
    assert not torch.equal(first.get_parameter("1.weight"), second.get_parameter("1.weight"))
    with torch.no_grad():
        first.get_parameter("1.bias").fill_(7.0)
    for name, value in single.ONE.state_dict().items():
        assert torch.equal(value, before[name])
    third = made(2, "torch")
    assert all(torch.equal(v, before[n]) for n, v in third.state_dict().items())


def test_a_parallel_model_is_audited_as_the_module_behind_it() -> None:
    def make() -> nn.Module:
        return nn.DataParallel(network())

    round_ = simulate(Scenario(make, data.load("digits")), torch.Generator().manual_seed(0))
    assert list(round_.updates[0]) == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_a_compiled_model_is_left_as_the_user_has_it() -> None:
    inner = torch.compile(network())
    own = nn.Sequential(inner, nn.Identity())
    round_ = simulate(Scenario(lambda: own, data.load("digits")), torch.Generator().manual_seed(0))
    assert own[0] is inner
    assert list(round_.updates[0]) == ["0.1.weight", "0.1.bias", "0.3.weight", "0.3.bias"]
