"""A decoder, fitted on public images through the model, from activations to images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leakgauge as lg
from leakgauge import fitting
from leakgauge.attacks import _decoder
from leakgauge.attacks._decoder import Fit, decode, fit, layout, pictures, varied
from leakgauge.attacks._trace import Trace
from leakgauge.errors import InputError, NotApplicable
from leakgauge.kept import Checkpoint
from leakgauge.records import Images
from leakgauge.types import Dataset, Resources

RECORD = Images((3, 16, 16), (0.5,), (0.25,))
SHORT = Fit(steps=120, images=480, width=24, lr=4e-3)


def images(count: int, seed: int, shape: tuple[int, int, int] = (3, 16, 16)) -> Tensor:
    """Smooth random pictures in [0, 1]."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, shape[0], 5, 5, generator=rng)
    return nn.functional.interpolate(coarse, shape[1:], mode="bilinear").clamp(0, 1)


def public(count: int = 480, shape: tuple[int, int, int] = (3, 16, 16)) -> Dataset:
    return Dataset("smooth", images(count, 1, shape), torch.zeros(count).long(), ("a", "b"))


def network(seed: int = 0, shape: tuple[int, int, int] = (3, 16, 16)) -> nn.Module:
    rng = torch.Generator().manual_seed(seed)
    return lg.models.make("resnet-10", shape=shape, classes=10, rng=rng, width=0.125)


def values(trace: Trace, node: str, batch: Tensor, record: Images = RECORD) -> Tensor:
    at = trace.named(node)
    with torch.no_grad():
        found: Tensor = trace.forward(record.entering(batch).double(), [at])[at]
    return found


def fitted(node: str = "layer2_0_act2", options: Fit = SHORT, **named: object) -> lg.types.Kept:
    trace = Trace(network(), RECORD.shape, train=True)
    rng = torch.Generator().manual_seed(3)
    given = {"free_scale": True, "options": options} | named
    return fit(trace, [node], RECORD, public(), 8, rng, **given)  # type: ignore[arg-type]


def psnr(guess: Tensor, truth: Tensor) -> float:
    return float((-10 * (guess - truth).square().flatten(1).mean(1).log10()).mean())


def test_decodes_images_that_it_has_not_seen_whatever_their_common_scale() -> None:
    kept = fitted()
    trace, batch = Trace(network(), RECORD.shape, train=True), images(8, 2)
    found = values(trace, "layer2_0_act2", batch)
    shown = decode(kept, "layer2_0_act2", found)
    mean = public().inputs.mean(0).expand_as(batch)
    assert psnr(shown, batch) > psnr(mean, batch) + 2.5
    assert shown.min() >= 0
    assert shown.max() <= 1
    assert (decode(kept, "layer2_0_act2", 0.003 * found) - shown).abs().max() < 1e-4
    facts = kept.facts
    assert facts["nodes"]["layer2_0_act2"]["psnr"] == pytest.approx(psnr(shown, batch), abs=2)
    assert facts["mean_psnr"] == pytest.approx(psnr(mean, batch), abs=1.5)
    assert (facts["public"], facts["used"]) == ("smooth", 480)
    assert facts["variants"] == 0
    assert facts["cpu_seconds"] > 0


def test_decoders_of_several_nodes_are_fitted_at_once() -> None:
    """Each on its own node: neither is worse than by itself, but for the draw of its weights."""
    nodes = ["layer2_0_act2", "act1"]
    trace, batch = Trace(network(), RECORD.shape, train=True), images(8, 2)
    rng = torch.Generator().manual_seed(3)
    kept = fit(trace, nodes, RECORD, public(), 8, rng, free_scale=True, options=SHORT)
    assert list(kept.facts["nodes"]) == nodes
    for node in nodes:
        shown = decode(kept, node, values(trace, node, batch))
        told = kept.facts["nodes"][node]["psnr"]
        assert told == pytest.approx(psnr(shown, batch), abs=2)
        assert told > kept.facts["mean_psnr"] + 2.5
    each = {node: kept.facts["nodes"][node]["psnr"] for node in nodes}
    assert each["act1"] > each["layer2_0_act2"] + 1  # it is nearer to the image


def test_an_exactly_known_scale_tells_how_bright_a_batch_is() -> None:
    trace = Trace(network(), RECORD.shape)
    record = replace(RECORD, mean=(0.0,))  # grey is not zero, so that light scales activations
    rng = torch.Generator().manual_seed(3)
    longer = replace(SHORT, steps=300)
    kept = fit(trace, ["act1"], record, public(), 8, rng, free_scale=False, options=longer)
    batch = images(8, 2)
    dark = decode(kept, "act1", values(trace, "act1", 0.5 * batch, record)).mean()
    light = decode(kept, "act1", values(trace, "act1", batch, record)).mean()
    assert dark < light - 0.1


def test_public_images_run_in_batches_of_the_client() -> None:
    trace = Trace(network(), RECORD.shape, train=True)
    rng = torch.Generator().manual_seed(3)
    few = Fit(steps=1, images=20)
    pairs = _decoder._Pairs.of(trace, ["act1"], RECORD, public(20), 8, rng, True, few)
    for begin in (0, 8):
        rows = slice(begin, begin + 8)
        wanted = values(trace, "act1", pairs.images[rows])
        wanted = wanted / wanted.square().mean().sqrt()
        assert (pairs.read("act1", rows) - wanted).abs().max() < 1e-2
    assert len(pairs.activations["act1"]) == 20  # the last batch was filled up and cut again


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = fitted()

    class Killed(Exception):
        pass

    def kill(done: int, total: int, objective: float) -> None:
        if done == 70:
            raise Killed

    place = Checkpoint(tmp_path / "decoder.safetensors", "key")
    with pytest.raises(Killed):
        fitted(resources=Resources(progress=kill, checkpoint=place))
    steps: list[int] = []
    later = Resources(progress=lambda done, *_: steps.append(done), checkpoint=place)
    again = fitted(resources=later)
    assert steps[0] == 51
    assert steps[-1] == SHORT.steps
    assert all(torch.equal(again.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert again.facts["nodes"] == whole.facts["nodes"]
    steps.clear()
    third = fitted(resources=later)
    assert not steps
    assert third.facts | {"cpu_seconds": 0} == again.facts | {"cpu_seconds": 0}
    assert third.facts["cpu_seconds"] > again.facts["cpu_seconds"]  # what was spent in all
    assert all(torch.equal(third.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_time_ends_the_fit_and_leaves_it_open(tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "decoder.safetensors", "key")
    kept = fitted(resources=Resources(seconds=0.0, checkpoint=place))
    assert kept.facts["steps"] == 0
    assert place.load() is None
    shown = decode(kept, "layer2_0_act2", torch.rand(2, 16, 8, 8))
    assert shown.shape == (2, 3, 16, 16)


def test_none_held_out_is_among_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_decoder, "varied", lambda images, rng: images)
    trace = Trace(network(), RECORD.shape, train=True)
    rng = torch.Generator().manual_seed(3)
    pairs = _decoder._Pairs.of(trace, ["act1"], RECORD, public(30), 8, rng, True, Fit(images=300))
    for kept in pairs.images[: pairs.held]:
        assert not (pairs.images[pairs.held :] == kept).flatten(1).all(1).any()


def test_the_best_on_images_held_out_is_kept_and_patience_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "PATIENCE", 3)
    seen: list[float] = []
    judged = _decoder._Pairs.score

    def heard(pairs: _decoder._Pairs, weights: lg.types.Named) -> float:
        seen.append(judged(pairs, weights))
        return seen[-1]

    monkeypatch.setattr(_decoder._Pairs, "score", heard)
    kept = fitted(options=replace(SHORT, lr=0.3, steps=300))  # so large a step that it diverges
    assert kept.facts["steps"] < 300
    assert kept.facts["nodes"]["layer2_0_act2"]["psnr"] == max(seen)
    assert seen[-2] < max(seen)


def test_few_images_are_varied() -> None:
    trace = Trace(network(), RECORD.shape, train=True)
    rng = torch.Generator().manual_seed(3)
    steep = Dataset("few", images(30, 1), torch.zeros(30).long(), ("a", "b"))
    pairs = _decoder._Pairs.of(trace, ["act1"], RECORD, steep, 8, rng, True, Fit(images=90))
    assert (len(pairs.images), pairs.made, pairs.held) == (90, 60, 3)
    marked = torch.zeros(40, 3, 16, 16)
    marked[:, 0, :8] = 1.0  # red above, which no flip, crop or light makes green or blue
    changed = varied(marked, torch.Generator().manual_seed(0))
    assert (changed[:, 0].flatten(1).std(1) > changed[:, 1].flatten(1).std(1) + 0.05).all()
    assert changed.flatten(1).std(0).max() > 0.05
    assert 0 <= changed.min() <= changed.max() <= 1


def test_memory_bounds_the_images() -> None:
    trace = Trace(network(), RECORD.shape, train=True)
    rng = torch.Generator().manual_seed(3)
    each = 2 * 8 * 16 * 16 + 4 * 3 * 16 * 16
    few = Fit(images=400, memory=100 * each)
    pairs = _decoder._Pairs.of(trace, ["act1"], RECORD, public(), 8, rng, True, few)
    assert len(pairs.images) == 100


@pytest.mark.parametrize(
    ("known", "shape"),
    [((16, 4, 4), (3, 32, 32)), ((16, 8, 8), (1, 30, 27)), ((40,), (1, 20, 20)),
     ((8, 16, 16), (3, 16, 16)), ((8, 32, 32), (3, 16, 16)), ((5,), (3, 4, 4))],
)  # fmt: skip
def test_any_node_and_any_image_size(known: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    weights = {name: torch.zeros(size) for name, size in layout(known, shape, 24).items()}
    weights["last.bias"] = torch.full((shape[0],), 0.3)
    shown = pictures(weights, torch.rand(2, *known), (shape[1], shape[2]))
    assert shown.shape == (2, *shape)
    assert torch.allclose(shown, torch.tensor(0.3))


def test_grey_images_of_an_odd_size_from_a_vector() -> None:
    class Plain(nn.Sequential):
        pass

    torch.manual_seed(0)
    model = Plain(nn.Flatten(), nn.Linear(1 * 9 * 7, 60), nn.ReLU(), nn.Linear(60, 4))
    record = Images((1, 9, 7))
    trace = Trace(model, record.shape, train=True)
    node = next(n.name for n in trace.nodes if trace.kind[n] == "relu")
    rng = torch.Generator().manual_seed(3)
    data = public(300, (1, 9, 7))
    options = replace(SHORT, images=300)
    kept = fit(trace, [node], record, data, 4, rng, free_scale=False, options=options)
    assert kept.facts["nodes"][node]["psnr"] > kept.facts["mean_psnr"] + 2


def test_refusals_say_what_to_do() -> None:
    trace = Trace(network(), RECORD.shape, train=True)
    rng = torch.Generator()
    wrong = public(10, (3, 8, 8))
    with pytest.raises(InputError, match=r"\(3, 8, 8\).*\(3, 16, 16\): resize"):
        fit(trace, ["act1"], RECORD, wrong, 4, rng, free_scale=True)
    with pytest.raises(InputError, match=r"at least 2 public images.*got 1"):
        fit(trace, ["act1"], RECORD, public(1), 4, rng, free_scale=True)
    with pytest.raises(InputError, match="got 0 records"):
        fit(trace, ["act1"], RECORD, public(9), 0, rng, free_scale=True)
    with pytest.raises(NotApplicable, match=r"maps .* or vectors.*\(7, 5\)"):
        layout((7, 5), (3, 16, 16), 24)
    kept = lg.types.Kept({}, {"nodes": {"act1": {"known": [16, 8, 8], "scale": None}}})
    with pytest.raises(InputError, match=r"\(16, 8, 8\).*got \(8, 8, 8\)"):
        decode(kept, "act1", torch.zeros(1, 8, 8, 8))
