"""Priors: trained, kept in a folder, loaded from another package's, and never on a client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from leakgauge import cli, data, priors
from leakgauge.audit import prior as courses
from leakgauge.errors import (
    CheckpointError,
    InputError,
    LeakGaugeError,
    MissingExtra,
    NotApplicable,
    PlanError,
    Withheld,
)
from leakgauge.priors import ddpm, folder
from leakgauge.tensors import seeded
from leakgauge.types import Dataset, Kept, Resources

QUICK = {"steps": 6, "batch": 4, "widths": (8, 8), "noises": 50}


def digits(count: int = 40, start: int = 0) -> Dataset:
    every = data.load("digits")
    part = slice(start, start + count)
    return Dataset("digits", every.inputs[part], every.labels[part], every.classes)


@pytest.fixture(scope="module")
def tiny() -> Kept:
    return priors.DDPM(**QUICK).train(digits(), seeded(1))


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("prior") / "tiny"
    priors.save(tiny, found)
    return found


def equal(left: Kept, right: Kept) -> bool:
    same = left.tensors.keys() == right.tensors.keys()
    return same and all(torch.equal(left.tensors[k], right.tensors[k]) for k in left.tensors)


# ---------------------------------------------------------------- every kind


def quick(kind: str, **options):
    """A training of some steps, as small as its options allow."""
    known = priors.KINDS[kind].__dataclass_fields__
    return priors.KINDS[kind](**{k: v for k, v in (QUICK | options).items() if k in known})


class Stopping:
    """Keeps the first checkpoint in memory, and kills the training when the next one comes."""

    def __init__(self):
        self.held = None
        self.kills = True

    def save(self, kept: Kept) -> None:
        if self.held is not None and self.kills:
            raise KeyboardInterrupt
        self.held = Kept({k: v.clone() for k, v in kept.tensors.items()}, dict(kept.facts))

    def load(self) -> Kept | None:
        return self.held


@pytest.mark.parametrize("kind", priors.KINDS)
def test_a_training_that_was_killed_goes_on_to_the_same_weights(kind):
    whole = quick(kind).train(digits(), seeded(1))
    place = Stopping()
    with pytest.raises(KeyboardInterrupt):
        quick(kind).train(digits(), seeded(1), Resources(checkpoint=place))
    place.kills = False
    calls = []
    resources = Resources(checkpoint=place, progress=lambda *call: calls.append(call))
    again = quick(kind).train(digits(), seeded(1), resources)
    assert calls[0][0] > 1  # it did not begin anew
    assert equal(whole, again)
    assert not equal(whole, quick(kind).train(digits(), seeded(2)))


@pytest.mark.parametrize("kind", priors.KINDS)
def test_the_facts_are_plain_and_say_what_it_learned_from(kind, tmp_path):
    kept = quick(kind).train(digits(), seeded(1))
    assert kept.facts["kind"] == kind
    assert kept.facts["shape"] == [1, 8, 8]
    assert (kept.facts["data"], kept.facts["records"]) == ("digits", 40)
    assert torch.equal(kept.tensors[folder.DIGESTS], folder.digests(digits().inputs))
    priors.save(kept, tmp_path)
    found = priors.load(str(tmp_path))
    assert found.facts == kept.facts
    assert equal(found, kept)


@pytest.mark.parametrize("kind", priors.KINDS)
def test_samples_are_pictures_that_follow_from_their_seed(kind):
    prior = priors.opened(quick(kind).train(digits(), seeded(1)))
    assert prior.shape == (1, 8, 8)
    before = torch.random.get_rng_state()
    first, again, other = (prior.sample(3, seeded(s)) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.shape == (3, 1, 8, 8)
    assert first.dtype == torch.float32
    assert (first >= 0).all()
    assert (first <= 1).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", priors.KINDS)
def test_only_pictures_are_learned_from(kind):
    lines = Dataset("table", torch.rand(20, 4), torch.zeros(20, dtype=torch.int64), ("a",))
    with pytest.raises(InputError, match=r"pictures \(N, C, H, W\), got \(20, 4\)"):
        quick(kind).train(lines, seeded())


# ---------------------------------------------------------------- diffusion


def test_it_learns_to_take_noise_off():
    """Trained on one flat grey, it finds that grey behind noise; untrained it does not."""
    grey = torch.full((64, 1, 8, 8), 0.8)
    public = Dataset("grey", grey, torch.zeros(64, dtype=torch.int64), ("a",))
    before, after = (
        priors.DDPM(steps=steps, batch=16, widths=(8, 16), lr=5e-3).train(public, seeded(1))
        for steps in (1, 250)
    )
    assert after.facts["score"] > before.facts["score"] + 6
    noise = torch.randn(4, 1, 8, 8, generator=seeded(2))
    far = []
    for kept in (before, after):
        prior = priors.Diffusion(kept)
        x = prior.alphas[300].sqrt() * 0.6 + (1 - prior.alphas[300]).sqrt() * noise
        far.append(float((prior.clean(x, 300)[0] - 0.6).abs().mean()))
    assert far[1] < 0.2 < 0.5 < far[0]


def test_the_levels_are_those_of_diffusers_and_the_split_is_its_own_inverse(tiny):
    from diffusers import DDPMScheduler

    prior = priors.Diffusion(tiny)
    wanted = DDPMScheduler.from_config(tiny.facts["scheduler"]).alphas_cumprod
    torch.testing.assert_close(prior.alphas, wanted)
    x = torch.randn(2, 1, 8, 8, generator=seeded(1))
    for t in (0, 20, 49):
        x0, noise = prior.clean(x, t)
        mixed = wanted[t].sqrt() * x0 + (1 - wanted[t]).sqrt() * noise  # DDPM, Eq. 4
        torch.testing.assert_close(mixed, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction", "sample"])
def test_whatever_a_network_predicts_a_step_is_that_of_diffusers(tiny, predicts):
    from diffusers import DDIMScheduler

    scheduler = dict(tiny.facts["scheduler"]) | {"prediction_type": predicts}
    prior = priors.Diffusion(Kept(tiny.tensors, {**tiny.facts, "scheduler": scheduler}))
    theirs = DDIMScheduler.from_config(
        scheduler | {"clip_sample": False, "set_alpha_to_one": True, "timestep_spacing": "trailing"}
    )
    theirs.set_timesteps(5)
    x = torch.randn(2, 1, 8, 8, generator=seeded(1))
    t, s = (int(t) for t in theirs.timesteps[:2])
    out = prior._network(x, torch.tensor([t, t])).sample
    wanted = theirs.step(out, t, x, eta=0.0).prev_sample
    torch.testing.assert_close(prior.step(*prior.clean(x, t), t, s), wanted, rtol=1e-3, atol=1e-3)


def test_a_conditional_one_tells_classes_apart_and_knows_one_that_means_any():
    light = torch.cat([torch.full((32, 1, 8, 8), v) for v in (0.1, 0.9)])
    labels = torch.arange(2).repeat_interleave(32)
    public = Dataset("light", light, labels, ("dark", "light"))
    options = {"steps": 250, "batch": 16, "widths": (8, 16), "lr": 5e-3}
    prior = priors.opened(priors.DDPM(**options, conditional=True).train(public, seeded(1)))
    noise = torch.randn(2, 1, 8, 8, generator=seeded(2))
    dark, light = (prior.clean(noise, 900, torch.full((2,), k))[0].mean() for k in (0, 1))
    assert float(light) > float(dark) + 0.5
    assert prior.told(None, 2).tolist() == [2, 2]
    assert prior.told(torch.tensor([1, 7]), 2).tolist() == [1, 2]


def test_a_trained_one_is_a_checkpoint_of_diffusers(place):
    from diffusers import DDPMPipeline

    pipeline = DDPMPipeline.from_pretrained(str(place), use_safetensors=True)
    prior = priors.Diffusion(priors.load(str(place)))
    x = torch.randn(2, 1, 8, 8, generator=seeded(3))
    theirs, ours = (n(x, torch.tensor([5, 5])).sample for n in (pipeline.unet, prior._network))
    torch.testing.assert_close(ours, theirs)


@pytest.fixture
def foreign(tmp_path) -> Path:
    """What somebody else saved with diffusers."""
    from diffusers import DDIMScheduler, UNet2DModel

    place = tmp_path / "foreign"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = UNet2DModel(
            sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
            block_out_channels=(8, 8), norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
    network.save_pretrained(place / "unet")
    DDIMScheduler(prediction_type="v_prediction").save_pretrained(place / "scheduler")
    return place


def test_any_checkpoint_of_diffusers_is_a_prior(foreign):
    kept = priors.load(str(foreign))
    assert (kept.facts["kind"], kept.facts["shape"]) == ("ddpm", [3, 16, 16])
    assert kept.facts["foreign"] == str(foreign)
    assert "nobody can check" in courses.told(priors.described(str(foreign)), (3, 16, 16))
    prior = priors.Diffusion(kept)
    assert prior._kind == "v_prediction"
    assert prior.sample(2, seeded(1)).shape == (2, 3, 16, 16)
    bare = foreign / "unet"  # the network alone
    assert priors.load(str(bare)).facts["scheduler"] == {}


def test_pickled_weights_are_refused(foreign):
    weights = foreign / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model.bin, and unpickling could"):
        priors.load(str(foreign))
    weights.with_suffix(".bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        priors.load(str(foreign))


def test_a_foreign_one_that_is_not_whole_is_refused(foreign):
    config = foreign / "unet" / "config.json"
    table = json.loads(config.read_text())
    config.write_text(json.dumps(table | {"block_out_channels": [8, 12]}))
    with pytest.raises(CheckpointError, match=r"could not be read|are not those"):
        priors.load(str(foreign))
    config.write_text(json.dumps(table | {"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(CheckpointError, match="checkpoint of UNet2DConditionModel, expected"):
        priors.load(str(foreign))
    config.write_text("[1")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        priors.load(str(foreign))


def test_what_is_nowhere_is_said(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"no folder .*missing: expected one that"):
        priors.load(str(tmp_path / "missing"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no prior in .*empty"):
        priors.load("empty")

    def offline(name, **options):
        assert options == {"allow_patterns": ["*.json", "*.safetensors"]}
        raise OSError("no way to the hub\nat all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"no folder org/name: .*\(OSError: no way to the hu"):
        priors.load("org/name")


def test_a_name_on_the_hub_is_fetched(foreign, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(foreign))
    assert priors.load("org/name").facts["foreign"] == "org/name"


def test_pictures_fit_that_are_smaller_or_grey_and_no_others(foreign):
    prior = priors.Diffusion(priors.load(str(foreign)))  # 3 × 16 × 16
    for shape in ((3, 16, 16), (1, 16, 16), (3, 12, 9), (1, 8, 8)):
        prior.check_fits(shape)
        images = torch.full((2, *shape), 0.75)
        inside = prior.entering(images)
        assert inside.shape == (2, 3, 16, 16)
        torch.testing.assert_close(inside, torch.full_like(inside, 0.5))
        torch.testing.assert_close(prior.leaving(inside, shape), images)
    for shape in ((3, 17, 16), (4, 16, 16)):
        with pytest.raises(NotApplicable, match="makes pictures of 3 × 16 × 16 and these records"):
            prior.check_fits(shape)


def test_widths_that_cannot_be_are_refused_and_sides_are_halved_as_often_as_they_can():
    with pytest.raises(ValueError, match=r"multiples of 8, got \[12\]"):
        priors.DDPM(widths=(12,))
    every = digits(8)
    odd = Dataset("odd", every.inputs[:, :, :6, :6], every.labels, every.classes)
    kept = priors.DDPM(steps=1, batch=2, widths=(8, 8, 8), noises=10).train(odd, seeded())
    assert kept.facts["unet"]["block_out_channels"] == [8, 8]
    assert priors.opened(kept).sample(1, seeded()).shape == (1, 1, 6, 6)


# ---------------------------------------------------------------- which one is used


def test_a_place_is_loaded_and_else_the_default_is_trained(place, tiny):
    default, public = priors.DDPM(**QUICK), digits()
    assert equal(priors.of(str(place), "ddpm", default, None, seeded()), tiny)
    assert equal(priors.of("", "ddpm", default, public, seeded(1)), tiny)
    with pytest.raises(Withheld, match="there are none: name a trained one"):
        priors.of("", "ddpm", default, None, seeded())
    with pytest.raises(NotApplicable, match="is of the kind ddpm, expected gan"):
        priors.of(str(place), "gan", default, None, seeded())


def test_without_the_extra_one_sentence_says_what_is_missing(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    words = r"a diffusion prior needs the package 'diffusers'.*leakgauge\[diffusion\]"
    with pytest.raises(MissingExtra, match=words):
        priors.DDPM(**QUICK).train(digits(), seeded())
    kept = priors.load(str(place))  # what it is can be read without
    with pytest.raises(MissingExtra, match=words):
        priors.opened(kept)
    with pytest.raises(MissingExtra, match=r"no folder org/name.*'huggingface_hub'"):
        priors.load("org/name")


# ---------------------------------------------------------------- the command


TRAIN = ["prior", "train", "--data", "digits", "--records", "30", "--steps", "6"]
TRAIN += ["--option", "batch=4", "--option", "widths=[8, 8]", "--option", "noises=20"]


def called(monkeypatch, capsys, *line: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["leakgauge", *line])
    with pytest.raises(SystemExit) as end:
        cli.main()
    got = capsys.readouterr()
    return int(end.value.code or 0), " ".join((got.out + got.err).split())


def test_the_command_trains_goes_on_and_shows(tmp_path, monkeypatch, capsys):
    out = tmp_path / "mine"
    line = [*TRAIN, "--out", str(out)]
    true = ddpm.fit

    def killed(*arguments, **options):
        checkpoint = arguments[3].checkpoint
        save = type(checkpoint).save

        def once(self, kept, seconds=None):
            save(self, kept, seconds)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(checkpoint), "save", once)
            return true(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ddpm, "fit", killed)
        code, words = called(patch, capsys, *line)
    assert code == 130
    assert "the same command goes on" in words
    assert not (out / folder.FACTS).exists()
    code, words = called(monkeypatch, capsys, *line)
    assert code == 0
    assert "30 records of digits" in words
    names = {file.name for file in out.iterdir()}
    wanted = {"prior.json", "prior.safetensors", "samples.png", "model_index.json"}
    assert names == wanted | {"unet", "scheduler"}
    whole, _ = courses.train(
        courses.Course("ddpm", {"steps": 6, "batch": 4, "widths": [8, 8], "noises": 20},
                       data.load("digits"), 30), tmp_path / "whole",
    )  # fmt: skip
    assert equal(whole, priors.load(str(out)))
    code, words = called(monkeypatch, capsys, *line)
    assert (code, "nothing to do" in words) == (0, True)
    code, words = called(monkeypatch, capsys, *line, "--seed", "1")
    assert (code, "holds another prior" in words) == (2, True)
    code, words = called(monkeypatch, capsys, "prior", "show", str(out), "--count", "3")
    assert (code, "1 × 8 × 8" in words) == (0, True)
    assert (out / "samples.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--data", "digts"], "did you mean 'digits'"),
        (["--data", "digits", "--kind", "gann"], "unknown kind of prior 'gann'"),
        (["--data", "digits", "--option", "lr"], "expected KEY=VALUE"),
        (["--data", "digits", "--option", "lr=-1"], "lr must be above 0"),
        (["--data", "digits", "--option", "wdths=[8]"], "did you mean 'widths'"),
        (["--data", "digits", "--records", "2000"], "2,000 records are asked for"),
        (["--data", "digits", "--size", "9"], "unknown option 'size'"),
    ],
)
def test_a_wrong_command_is_refused_and_leaves_nothing(tmp_path, monkeypatch, capsys, line, words):
    code, said = called(monkeypatch, capsys, "prior", "train", *line, "--out", str(tmp_path / "x"))
    assert code == 2
    assert words in said
    assert not (tmp_path / "x").exists()


def test_the_records_of_a_course_follow_from_its_seed():
    every = data.load("digits")
    first, again, other = (courses.Course("ddpm", {}, every, 20, s).public() for s in (0, 0, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert len(first) == 20


def test_a_prior_of_a_client_is_refused(place):
    known = priors.described(str(place))
    courses.check_clean(known, digits(20, 40).inputs, "attack", "digits")
    with pytest.raises(PlanError, match=r"trained on 3 of the clients' records, bit for bit"):
        courses.check_clean(known, digits(20, 37).inputs, "attack", "digits")
    assert "none of them is a client's" in courses.told(known, (1, 8, 8))
    assert "cannot be checked at that size" in courses.told(known, (1, 16, 16))


def test_errors_are_ours(tmp_path):
    (tmp_path / folder.FACTS).write_text('{"kind": 3}')
    with pytest.raises(LeakGaugeError, match="is not that of a prior: expected 'kind'"):
        priors.load(str(tmp_path))
