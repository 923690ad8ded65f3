"""What travelled in a federation of your own, written down to be audited later.

    DIR/round-000.safetensors        the global model, every client's update, the parameters after
    DIR/round-000.truth.safetensors  the clients' records, only if you give them
    DIR/round-000.json               the rest; a round counts once this file is there

Each call of `capture` adds a round. Files are written whole, belong to their owner alone, and are
never replaced. `leakgauge audit DIR` attacks what is in them; without the records its trials are
not scored. Nothing that is read can run code: the model is built by the function that `made_by`
names, which is yours.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from leakgauge._version import __version__
from leakgauge.config import build, plain
from leakgauge.errors import InputError, LeakGaugeError, PlanError
from leakgauge.files import json_text, read_plain, read_tensors, some, tensor_bytes, write_atomic
from leakgauge.fl import aggregate
from leakgauge.records import Classes, Columns, Images, Record, Tokens
from leakgauge.tensors import check_like, parameters, subtract
from leakgauge.types import Batch, Exchange, LocalTraining, Named, Round, Setting

VERSION = 1
TRUTH = "truth.safetensors"
KINDS: dict[str, type[Record]] = {"images": Images, "tokens": Tokens, "columns": Columns}


@dataclass(frozen=True)
class Manifest:
    """What stands in round-000.json. `digests` are the SHA-256 of the files beside it."""

    version: int
    leakgauge: str
    made_by: str | dict[str, Any]
    kind: Literal["images", "tokens", "columns"]
    record: dict[str, Any]
    classes: tuple[str, ...]
    training: LocalTraining
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    server_lr: float
    announced: dict[str, Any] | None
    digests: dict[str, str]


def capture(
    folder: Path | str,
    model: nn.Module,
    sent: Sequence[Mapping[str, Tensor]],
    *,
    made_by: str | dict[str, Any],
    record: Record,
    classes: Sequence[str] | int,
    training: LocalTraining,
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    server_lr: float = 1.0,
    after: Mapping[str, Tensor] | None = None,
    announced: Mapping[str, object] | None = None,
    truths: Sequence[Batch] | None = None,
) -> Path:
    """Add a round to the folder, and return the path of its manifest.

    `model` is the global model before the round. `sent[k]` is what client k sent: its new weights
    if `training.sends` is "weights", else its update (before − after). `made_by` builds the same
    network: "module:callable", or a model of ours as in a plan. `sizes[k]` is client k's number of
    records; `weights` are those of the aggregate (default: by size), `after` the parameters that
    came out (default: those of federated averaging). `truths[k]` are client k's own records:
    without them nobody can tell how good a reconstruction is. The updates alone may give the
    records away: treat the folder like the records in any case.
    """
    before = {name: value.cpu() for name, value in parameters(model).items()}
    updates = tuple(_update(one, before, training, k) for k, one in enumerate(sent))
    sizes = tuple(map(int, sizes))
    shares = tuple(aggregate.weights(sizes, "records") if weights is None else map(float, weights))
    names = tuple(map(str, range(classes) if isinstance(classes, int) else classes))
    for name, given in (("sizes", sizes), ("weights", shares), ("truths", truths)):
        if given is not None and len(given) != len(updates):
            raise InputError(f"{name}: expected one per client, {len(updates)}, got {len(given)}")
    if not updates or abs(sum(shares) - 1) > 1e-6:
        raise InputError(
            f"expected updates of at least one client with weights that sum to 1, got "
            f"{len(updates)} with {sum(shares):g}"
        )
    if after is None:
        after = aggregate.step(before, updates, shares, server_lr)
    after = {name: after[name].detach().cpu() for name in before if name in after}
    check_like(after, before.items(), "the parameters after the round")
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"after/{name}": value for name, value in after.items()}
    for k, update in enumerate(updates):
        tensors |= {f"update/{k}/{name}": value for name, value in update.items()}
    files = {"safetensors": tensor_bytes(tensors)}
    if truths is not None:
        files[TRUTH] = tensor_bytes(_checked(truths, sizes, record, len(names)))
    kind = next(name for name, kind in KINDS.items() if isinstance(record, kind))
    manifest = Manifest(
        version=VERSION,
        leakgauge=__version__,
        made_by=made_by,
        kind=kind,  # type: ignore[arg-type]  # a key of KINDS
        record=plain(record),
        classes=names,
        training=training,
        sizes=sizes,
        weights=shares,
        server_lr=server_lr,
        announced=None if announced is None else dict(announced),
        digests={suffix: hashlib.sha256(content).hexdigest() for suffix, content in files.items()},
    )
    table = plain(manifest)
    try:
        files["json"] = json_text(table).encode()
        build(Manifest, table, "round")  # what could not be read is not written
    except (TypeError, PlanError) as error:
        raise InputError(f"made_by or announced cannot be written as JSON: {error}") from error
    stem = _free(Path(folder))
    for suffix, content in files.items():  # the manifest last: with it the round counts
        write_atomic(stem.with_name(f"{stem.name}.{suffix}"), content, private=True, fresh=True)
    return stem.with_name(f"{stem.name}.json")


def _update(
    sent: Mapping[str, Tensor], before: Named, training: LocalTraining, client: int
) -> Named:
    what = f"what client {client} sent"
    if training.sends == "weights":
        own = {name: sent[name].detach().cpu() for name in before if name in sent}
        check_like(own, before.items(), what)  # what a state dict has beyond them is no update
        return subtract(before, own)
    check_like(sent, before.items(), what)
    return {name: sent[name].detach().cpu() for name in before}


def _checked(
    truths: Sequence[Batch], sizes: Sequence[int], record: Record, classes: int
) -> dict[str, Tensor]:
    for k, (truth, size) in enumerate(zip(truths, sizes, strict=True)):
        shape = (size, *record.shape)
        if tuple(truth.inputs.shape) != shape or tuple(truth.labels.shape) != (size,):
            raise InputError(
                f"truths[{k}]: expected {size} records {shape} with a label each, got "
                f"{tuple(truth.inputs.shape)} and {tuple(truth.labels.shape)}"
            )
        if not 0 <= int(truth.labels.min()) <= int(truth.labels.max()) < classes:
            raise InputError(f"truths[{k}]: expected labels from 0 to {classes - 1}")
        if isinstance(record, Images) and not (0 <= truth.inputs.min() <= truth.inputs.max() <= 1):
            raise InputError(f"truths[{k}]: expected pictures with values from 0 to 1")
    inputs = {f"inputs/{k}": truth.inputs for k, truth in enumerate(truths)}
    return inputs | {f"labels/{k}": truth.labels for k, truth in enumerate(truths)}


def _free(folder: Path) -> Path:
    """The stem of the next round: behind all files that are there, finished or not."""
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"{folder} is a file: name a folder for what is captured")
    found = [re.match(r"round-(\d+)\.", path.name) for path in _listed(folder)]
    number = max((int(one.group(1)) for one in found if one), default=-1) + 1
    return folder / f"round-{number:03}"


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def manifests(folder: Path) -> list[tuple[Path, Manifest]]:
    """The rounds in a folder, in order; what is wrong with one is said."""
    found = [p for p in _listed(folder) if re.fullmatch(r"round-\d+\.json", p.name)]
    if not found:
        raise PlanError(
            f"{folder} holds no captured round: expected round-000.json and its like, as "
            "leakgauge.capture() writes them"
        )
    return [(path, _manifest(path)) for path in found]


def _manifest(path: Path) -> Manifest:
    try:
        table = json.loads(read_plain(path))
        version = table.get("version") if isinstance(table, dict) else None
        if version != VERSION:
            raise PlanError(f"expected version {VERSION}, got {version!r}")
        return build(Manifest, table, "round")
    except (OSError, ValueError, RecursionError, LeakGaugeError) as error:
        raise PlanError(f"{path} is not the manifest of a captured round: {error}") from error


def exchange(path: Path, manifest: Manifest, model: nn.Module, *, truths: bool) -> Exchange:
    """The round behind a manifest, with a fresh `model` filled; with its `truths` a `Round`. A file
    that is not the one that was written is refused."""
    tensors = _verified(path, manifest, "safetensors")
    model = copy.deepcopy(model)
    state = {n.removeprefix("model/"): v for n, v in tensors.items() if n.startswith("model/")}
    own = model.state_dict()
    wrong = {n for n in {*state, *own} if n not in state or n not in own
             or state[n].shape != own[n].shape}  # fmt: skip
    if wrong:
        raise PlanError(
            f"{path}: the network that {manifest.made_by!r} builds is not the one that was "
            f"captured; they differ in {some(wrong)}"
        )
    model.load_state_dict(state)
    kind = KINDS[manifest.kind]
    setting = Setting(
        model, build(kind, manifest.record, f"{path}: record"), Classes(len(manifest.classes))
    )
    names = list(parameters(model))
    clients = range(len(manifest.sizes))
    sent = Exchange(
        setting=setting,
        updates=tuple({n: tensors[f"update/{k}/{n}"] for n in names} for k in clients),
        weights=manifest.weights,
        after={n: tensors[f"after/{n}"] for n in names},
        training=manifest.training,
        sizes=manifest.sizes,
        index=int(path.stem.removeprefix("round-")),
        server_lr=manifest.server_lr,
        announced=manifest.announced,
    )
    if not truths:
        return sent
    found = _verified(path, manifest, TRUTH)
    batches = tuple(Batch(found[f"inputs/{k}"], found[f"labels/{k}"]) for k in clients)
    return Round(**vars(sent), truths=batches, memory=tuple({} for _ in clients))


def _verified(path: Path, manifest: Manifest, suffix: str) -> Named:
    file = path.with_name(f"{path.stem}.{suffix}")
    try:
        found = hashlib.sha256(read_plain(file)).hexdigest()
    except OSError as error:
        raise PlanError(f"{file} cannot be read ({error.strerror}): copy it again") from error
    if found != manifest.digests.get(suffix):
        raise PlanError(f"{file} is not the file that was captured: it was changed or cut short")
    return read_tensors(file)
