"""A plan: the TOML file that describes the federation, the attacker and what to measure.

The file is read strictly (see config.py): an unknown key is an error that suggests the known one.
Paths in it are relative to the file. `module:callable` names the user's own code, which runs with
the user's rights; its module is looked for beside the plan first.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from leakgauge import data, models, priors, threat
from leakgauge._version import __version__
from leakgauge.attacks import ACTIVE_ATTACKS, ATTACKS, Begun, ExactRecursion, begun
from leakgauge.attacks.begun import searches
from leakgauge.attacks.parts import Search
from leakgauge.audit import captured, comparison
from leakgauge.audit import prior as prior_records
from leakgauge.audit import public as public_records
from leakgauge.audit.document import (
    ANNOUNCED,
    BEGIN,
    BLIND,
    CHAIN,
    NO_DEFENCE,
    RESTORE,
    Document,
    Federation,
    Table,
    duration,
    name_of,
)
from leakgauge.audit.results import Source
from leakgauge.config import build, choose, convert, did_you_mean, installed, plain, shown
from leakgauge.defences import DEFENCES, Chain
from leakgauge.errors import LeakGaugeError, PlanError
from leakgauge.files import read_plain
from leakgauge.fl import PARTITIONS, Scenario
from leakgauge.fl.aggregate import dropping
from leakgauge.fl.local import step_count
from leakgauge.fl.model import plain as plain_model
from leakgauge.fl.partition import Partition
from leakgauge.fl.simulate import check_secure, initial_model
from leakgauge.metrics import METRICS, lpips
from leakgauge.outside import Method, find, import_from, own_files, unused
from leakgauge.ranges import OF_PLANS, check_numbers
from leakgauge.records import record_of, refuse_moved
from leakgauge.restore import RESTORERS
from leakgauge.tensors import raw
from leakgauge.types import (
    Answered,
    Attack,
    Dataset,
    Defence,
    Exchange,
    LocalTraining,
    Metric,
    PreparedAttack,
    Restorer,
    ThreatModel,
)

T = TypeVar("T")
MOST_STEPS = 1_000_000  # of local training, in one round
PRIOR = "prior"  # the option of attacks and restorers that names one


@dataclass(frozen=True)
class Plan:
    """A checked plan, ready to run: every name resolved, the data loaded. `asked` are the attacks
    that the file names; the exact recursion is run without being asked. `data` is what the clients
    share out, `public` what the attacker holds beside it, and `public_source` where that is from.
    `metrics` are those of the file, PSNR always. `restorers` work on the guesses of the attacks of
    their names. `captured` are the rounds to attack, one per stage, where they are not
    simulated. `held_out` are the records on which a trade-off measures accuracy: no client's, and
    not the attacker's. `blind` are attacks that are run again on every defence, ignoring it, with
    the names of those that know it: who knows a defence may still do better by ignoring it.
    `priors` are those that attacks and restorers of the file name, as the file writes them."""

    name: str
    document: Document
    folder: Path
    data: Dataset
    public: Dataset
    public_source: Source
    attacks: Mapping[str, Attack]
    defences: Mapping[str, Defence | None]
    partition: Partition
    asked: tuple[str, ...]
    metrics: Mapping[str, Metric]
    restorers: Mapping[str, Restorer] = field(default_factory=dict)
    captured: tuple[Exchange, ...] = ()
    outside: tuple[Method, ...] = ()
    held_out: Dataset | None = None
    blind: Mapping[str, str] = field(default_factory=dict)
    priors: Mapping[str, priors.Described] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Differs when a trial could: by the tables, the records, the code and the model that
        `module:callable` names, the weights, the priors or the version."""
        document = self.document
        content = [__version__, plain(document), self.data.classes]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
        for records in (self.data, self.public, *([self.held_out] if self.held_out else [])):
            for values in (records.inputs, records.labels):
                digest.update(f"{tuple(values.shape)}".encode())
                digest.update(raw(values))
        first = self.scenario(document.federation.rounds[0], next(iter(self.defences)))
        model = initial_model(first, torch.Generator().manual_seed(0))
        digest.update(str(model).encode())
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(f"{value.requires_grad}".encode())
            digest.update(raw(value))
        for exchange in self.captured:
            for update in (*exchange.updates, exchange.after, dict(exchange.model.state_dict())):
                for value in update.values():
                    digest.update(raw(value))
        names = [name_of(document.federation.model), name_of(document.federation.data)]
        digest.update(" ".join(method.package for method in self.outside).encode())
        for name in (*names, *(method.spec for method in self.outside)):
            for file in own_files(name, self.folder):
                digest.update(f"{file.name} ".encode() + file.read_bytes())
        for prior in self.priors.values():
            for file in prior.files:
                digest.update(f"{file.name} ".encode() + file.read_bytes())
        return digest.hexdigest()

    @property
    def budget(self) -> float | None:
        """Seconds that the plan allows, if it says."""
        text = self.document.audit.budget
        return None if text is None else duration(text, "audit.budget")

    def scenario(self, stage: int, defence: str) -> Scenario:
        federation = self.document.federation
        return Scenario(
            make_model=self._make_model,
            data=self.data,
            training=federation.training,
            clients=federation.clients,
            participants=federation.participants,
            records=federation.records,
            rounds=stage,
            server_lr=federation.server_lr,
            weighting=federation.weighting,
            partition=self.partition,
            defence=self.defences[defence],
            scale=federation.record,
            secure=federation.secure,
        )

    def _make_model(self) -> nn.Module:
        federation = self.document.federation
        assert federation.model is not None  # checked when the plan was read
        name, options = _name(federation.model, "federation.model")
        import_from(self.folder, name)
        _, channels, height, width = self.data.inputs.shape
        try:
            model = models.make(
                name,
                shape=(channels, height, width),
                classes=len(self.data.classes),
                init=federation.init,
                rng=torch.default_generator,  # seeded by `simulate`
                **options,
            )
        except LeakGaugeError:
            raise
        except Exception as error:  # torch says what sizes it cannot build, in its own words
            raise PlanError(
                f"federation.model: {name!r} cannot be built with {options} for images "
                f"{channels} × {height} × {width} and {len(self.data.classes)} classes "
                f"({type(error).__name__}: {error})"
            ) from error
        if federation.checkpoint:
            models.load(model, _path(self.folder, federation.checkpoint))
        if self.captured:
            model.load_state_dict(self.captured[0].model.state_dict())
        return model


def read(path: Path) -> Plan:
    """The plan in a TOML file, or that of a folder of captured rounds, fully checked."""
    if path.is_dir() and any(path.glob("round-*.json")):
        return parse(captured.table(path), path.resolve().name, Path.cwd())
    try:
        table = tomllib.loads(read_plain(path).decode())
    except FileNotFoundError:
        raise PlanError(f"no plan at {path}: give the path of a TOML file") from None
    except IsADirectoryError:
        raise PlanError(
            f"{path} is a folder without captured rounds: give the path of a TOML file"
        ) from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise PlanError(f"{path} is not a plan: its lists are nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise PlanError(f"{path} is not valid TOML: {error}") from error
    name = path.stem.encode(errors="replace").decode()  # a file's name may be no text
    return parse(table, name, path.resolve().parent)


def parse(table: Mapping[str, Any], name: str, folder: Path, loaded: Dataset | None = None) -> Plan:
    """The plan of a table; `folder` is where its relative paths start. `loaded` are the records of
    `federation.data`, where they were read before."""
    for key in ("attack", "defence"):
        if isinstance(table.get(key), Mapping):
            raise PlanError(f"{name}: write [[{key}]] with two brackets, there may be several")
    federation = table.get("federation")
    if isinstance(federation, Mapping):
        refuse_moved(federation.get("training"), "federation.training", "[federation.record]")
    document = build(Document, table, name)
    _check_names(document, name)
    check_numbers(document, name, OF_PLANS)
    document = comparison.filled(document, staged="rounds" in table["federation"])
    rounds = captured.found(document.federation, folder)
    if rounds:
        document = captured.filled(document, rounds)
    federation = document.federation
    if federation.model is None:
        raise PlanError(f"{name}.federation: key 'model' is missing")
    _check_actor(document.threat, federation)
    who = replace(document.threat, grants=threat.granted(document.threat))
    document = replace(document, threat=who)  # a result says what was granted
    if threat.PUBLIC in threat.granted(who):
        raise PlanError(
            "threat.grants: public records are declared, not granted: leave 'public' out, and give "
            "federation.public a number of records to set aside, or a data set"
        )
    ours = ATTACKS | ACTIVE_ATTACKS
    named: dict[str, priors.Described] = {}
    attacks, restorers, outside = _each("attack", ours, document.attack, folder, named)
    for key, attack in attacks.items():
        _check_needs(key, attack)
        threat.check(key, attack, document.threat, public=federation.public != 0)
    asked = tuple(attacks)
    if document.audit.exact and ExactRecursion.needs <= threat.holds(document.threat):
        attacks = {"exact-recursion": ExactRecursion()} | attacks
    model, _ = _name(federation.model, "federation.model")
    if ":" not in model:
        choose(models.MODELS, model, "model")
    choose(models.INITS, federation.init, "initialisation")
    partition = _partition(federation.partition)
    known = {**DEFENCES, CHAIN: Chain, NO_DEFENCE: None}
    defences, _, others = _each("defence", known, document.defence, folder)
    where = "federation.data"
    if rounds:
        records = captured.records(*rounds[0])
    else:
        records = _load(federation.data, folder, where) if loaded is None else loaded
    record_of(records.inputs, federation.record)  # refuses a scale that does not fit
    if "metrics" not in table.get("audit", {}) and lpips.measures(records.inputs.shape[1:]):
        # A result says what was measured, and an audit is resumed with no other metrics.
        measured = (*document.audit.metrics, "lpips")
        document = replace(document, audit=replace(document.audit, metrics=measured))
    scores = [
        find("metric", one, METRICS, folder)
        for one in dict.fromkeys(("psnr", *document.audit.metrics))
    ]
    chosen: dict[str, Metric] = {}
    for one in scores:
        chosen[unused(one.key, chosen)] = one.item
    held_out = None
    if document.tradeoff:
        held_out, records = comparison.held_out(records, document.tradeoff)
    taken = federation.records if isinstance(federation.records, int) else len(records)
    _check_length(federation.training, taken)
    blind = _blind(attacks, asked, defences) if document.audit.adaptive else {}
    plan = Plan(
        name=name,
        document=document,
        folder=folder,
        data=records,
        public=replace(records, inputs=records.inputs[:0], labels=records.labels[:0]),
        public_source="set aside",
        attacks=_beside(attacks, blind),
        defences=defences,
        partition=partition,
        asked=asked,
        metrics=chosen,
        restorers=_beside(restorers, blind),
        outside=(*outside, *others, *(one for one in scores if one.spec)),
        blind=blind,
        priors=named,
    )
    if rounds:
        sent = captured.rounds(rounds, plain_model(plan._make_model(), "made_by"))
        plan = replace(plan, captured=sent, data=captured.with_truths(records, sent))
        if any(one.announced is not None for one in sent):  # of which its attackers know no more
            plan = replace(plan, defences={ANNOUNCED: None})
    public, source, private = public_records.shared_out(
        federation,
        plan.data,
        partial(_load, folder=folder, where="federation.public"),
        malicious=document.threat.malicious and not rounds,
        needed=any(threat.PUBLIC in attack.needs for attack in attacks.values()),
    )
    plan = replace(plan, public=public, public_source=source, data=private)
    for written, prior in named.items():
        prior_records.check_clean(prior, plan.data.inputs, f"prior = {written!r}", plan.data.name)
    if held_out is not None:
        plan = replace(plan, held_out=comparison.unknown(held_out, plan.public))
    check_secure(plan.scenario(federation.rounds[0], next(iter(plan.defences))))
    return plan


def load_data(plan: Plan) -> Dataset:
    """All records that a plan names, before public ones are set aside."""
    return _load(plan.document.federation.data, plan.folder, "federation.data")


def _blind(
    attacks: Mapping[str, Attack], asked: Sequence[str], defences: Mapping[str, Defence | None]
) -> dict[str, str]:
    """Attacks that are also run while they ignore the defence: all that prepare nothing."""
    if not any(isinstance(defence, Answered) for defence in defences.values()):
        return {}
    return {
        unused(f"{key}{BLIND}", attacks): key
        for key in asked
        if not isinstance(attacks[key], PreparedAttack)
    }


def _beside(items: Mapping[str, T], blind: Mapping[str, str]) -> dict[str, T]:
    """Each item followed by what is the same of the blind attack."""
    named = {key: new for new, key in blind.items()}
    return {name: item for key, item in items.items()
            for name in (key, named.get(key)) if name is not None}  # fmt: skip


def _path(folder: Path, path: str) -> Path:
    """A path as the plan writes it: relative to the plan, or in the user's home."""
    return folder / Path(path).expanduser()


def _name(value: str | Table, where: str, *also: str) -> tuple[str, Table]:
    """The `name` of a table and its other keys; text is a name without others."""
    options: Table = {"name": value} if isinstance(value, str) else dict(value)
    if "name" not in options:
        keys = ("name", *also)
        hint = did_you_mean(next(iter(options), ""), keys)
        raise PlanError(f"{where}: key {' or '.join(map(repr, keys))} is missing{hint}")
    name = options.pop("name")
    if not isinstance(name, str):
        raise PlanError(f"{where}.name: expected text, got {name!r}")
    return name, options


def _each(
    what: str, ours: Mapping[str, Any], tables: tuple[str | Table, ...], folder: Path,
    named: dict[str, priors.Described] | None = None,
) -> tuple[dict[str, Any], dict[str, Restorer], list[Method]]:  # fmt: skip
    """Instances by name, a name used again with a number; the restorers of attacks, under the name
    of what they restore; and those from outside this package. The priors that they name go into
    `named`."""
    named = {} if named is None else named
    made: dict[str, Any] = {}
    restorers: dict[str, Restorer] = {}
    outside = []
    for table in tables:
        name, options = _name(table, what)
        if what == "defence" and name == CHAIN:
            key, chain, others = _chain(options, folder)
            made[unused(key, made)] = chain
            outside += others
            continue
        chosen = options.pop(RESTORE, None) if what == "attack" else None
        begin = options.pop(BEGIN, None) if what == "attack" else None
        method = find(what, name, ours, folder)
        if method.item is None and options:
            raise PlanError(f"{what} {name!r} takes no options, got {', '.join(options)}")
        if what == "attack":
            options = _placed(options, folder, named)
        found = method.item and method.make(options, f"{what} {name!r}")
        _check_extras(found, f"{what} {name!r}")
        outside += [method] if method.spec else []
        key = method.key
        if begin is not None:
            key, found, others = _begun(begin, name, method.key, found, folder, named)
            outside += others
        if chosen is not None:
            chosen = convert(chosen, str | dict[str, Any], f"{what} {name!r}: {RESTORE}")
            own, more = _name(chosen, "restorer")
            restorer = find("restorer", own, RESTORERS, folder)
            key = unused(f"{key}+{restorer.key}", made)
            more = _placed(more, folder, named)
            restorers[key] = restorer.make(more, f"restorer {own!r}")
            _check_extras(restorers[key], f"restorer {own!r}")
            if getattr(restorers[key], PRIOR, None) == "":
                raise PlanError(
                    f"restorer {own!r}: name the prior that it works with, as in "
                    f'{PRIOR} = "FOLDER" (`leakgauge prior train` makes one)'
                )
            outside += [restorer] if restorer.spec else []
        made[unused(key, made)] = found
    return made, restorers, outside


def _placed(options: Table, folder: Path, named: dict[str, priors.Described]) -> Table:
    """Options in which a prior is named by the folder in which it lies on this machine."""
    written = options.get(PRIOR)
    if not isinstance(written, str) or not written:
        return options
    if written not in named:
        named[written] = priors.described(written, folder)
    return options | {PRIOR: str(named[written].place)}


def _check_extras(found: object, use: str) -> None:
    """Refuse what needs a package that is not there, before anything runs."""
    for package, extra in getattr(found, "extras", ()):
        installed(package, extra, use)


def _begun(
    table: object, name: str, key: str, search: Attack, folder: Path,
    named: dict[str, priors.Described],
) -> tuple[str, Begun, list[Method]]:  # fmt: skip
    """A search that begins from the guess of the attack of this table, called by both."""
    where = f"attack {name!r}: {BEGIN}"
    if not searches(search):
        can = ", ".join(n for n, one in sorted(ATTACKS.items()) if issubclass(one, Search))
        raise PlanError(
            f"{where}: it does not search by matching gradients, so it begins from no other "
            f"attack's guess: leave {BEGIN} out, or use one that does: {can}"
        )
    first_table = convert(table, str | dict[str, Any], where)
    try:
        firsts, restorers, outside = _each(
            "attack", ATTACKS | ACTIVE_ATTACKS, (first_table,), folder, named
        )
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    ((called, first),) = firsts.items()
    hybrid = begun(first, search, restorers.get(called), (called, key))
    return f"{called}+{key}", hybrid, outside


def _chain(options: Table, folder: Path) -> tuple[str, Chain, list[Method]]:
    """Several defences as one, called by the names of its parts."""
    where = f"defence {CHAIN!r}"
    for key in options:
        if key != "defences":
            raise PlanError(f"{where}: unknown key {key!r}{did_you_mean(key, ['defences'])}")
    hint = tuple[str | dict[str, Any], ...]
    tables = convert(options.get("defences", ()), hint, f"{where}.defences")
    parts, _, outside = _each("defence", {**DEFENCES, CHAIN: Chain}, tables, folder)
    try:
        return "+".join(parts), Chain(tuple(parts.values())), outside
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error


def _partition(value: str | Table) -> Partition:
    name, options = _name(value, "partition")
    method = Method(name, choose(PARTITIONS, name, "partition"))
    made: Partition = method.make(options, f"partition {name!r}")
    return made


def _load(value: str | Table, folder: Path, where: str) -> Dataset:
    options: Table = {"name": value} if isinstance(value, str) else dict(value)
    for short in ("folder", "npz"):
        if short in options and "name" not in options:
            options |= {"name": short, "path": options.pop(short)}
    name, options = _name(options, where, "folder", "npz")
    for key in ("path", "root"):
        if isinstance(options.get(key), str):
            options[key] = _path(folder, options[key])
    import_from(folder, name)
    try:
        return data.load(name, **options)
    except (Exception, SystemExit) as error:
        if isinstance(error, LeakGaugeError) or ":" not in name:
            raise
        raise PlanError(  # whatever the user's own code raised
            f"{where}: {name!r} failed ({type(error).__name__}: {error})"
        ) from error


def _check_names(document: Document, name: str) -> None:
    """What the file asks for by name and this machine must have."""
    if not document.attack:
        raise PlanError(f"{name}: no [[attack]]; known: {', '.join(sorted(ATTACKS))}")
    try:
        torch.empty(0, device=document.audit.device)
    except (RuntimeError, AssertionError) as error:
        raise PlanError(
            f"{name}.audit: device {document.audit.device!r} is not there: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _check_needs(key: str, attack: Attack) -> None:
    try:
        needs: object = attack.needs
    except Exception as error:  # it may be the user's own code
        raise PlanError(
            f"attack {key!r}: its needs failed ({type(error).__name__}: {error})"
        ) from error
    known = threat.KNOWLEDGE.keys()
    if not isinstance(needs, frozenset) or not needs <= known:
        raise PlanError(
            f"attack {key!r}: its needs must be a frozenset of {', '.join(sorted(known))}; got "
            f"{shown(needs)}"
        )
    if threat.PUBLIC in needs and not isinstance(attack, PreparedAttack):
        raise PlanError(
            f"attack {key!r}: it needs public records, which an attack meets before the round: "
            "give it prepare() and manipulates"
        )


def _check_actor(who: ThreatModel, federation: Federation) -> None:
    if who.malicious and not threat.sends(who.actor):
        one = "a client" if who.actor == "client" else f"an {who.actor}"
        raise PlanError(
            f'threat.malicious = true with threat.actor = "{who.actor}": {one} sends no model to '
            'others and so cannot change it; use actor "server" or "aggregate", or leave '
            "malicious out"
        )
    if threat.sees_one(who.actor) and federation.secure is not None:
        raise PlanError(
            f'threat.actor = "{who.actor}" with [federation.secure]: behind secure aggregation '
            "nobody sees the update of one client, which is masked on its way; use actor "
            '"aggregate", or leave federation.secure out'
        )
    taking = federation.participants or federation.clients
    present = taking - dropping(taking, federation.secure)
    if who.client >= present:
        raise PlanError(
            f"threat.client is {who.client}, but {present} clients take part in a round and are "
            f"counted from 0: give 0 to {present - 1}"
        )
    if who.actor == "client" and present == 1:
        raise PlanError(threat.ALONE)
    if who.rounds < 1:
        raise PlanError(f"threat.rounds must be at least 1, got {who.rounds}")
    if who.rounds > 1:
        _check_rounds(who, federation)


def _check_rounds(who: ThreatModel, federation: Federation) -> None:
    """Refuse several rounds where there are not so many, or not of the same clients."""
    if federation.captured is not None:
        raise PlanError(
            f"threat.rounds = {who.rounds}: captured rounds are audited one by one; leave it out"
        )
    if min(federation.rounds) < who.rounds - 1:
        raise PlanError(
            f"threat.rounds = {who.rounds}: {who.rounds - 1} honest rounds or more must come "
            f"before the attacked one, got federation.rounds = {list(federation.rounds)}"
        )
    taking = federation.participants or federation.clients
    if taking < federation.clients or dropping(taking, federation.secure):
        raise PlanError(
            f"threat.rounds = {who.rounds}: several rounds are of use where every client is in "
            "each of them: leave federation.participants and federation.secure.dropped out, or "
            "threat.rounds"
        )


def _check_length(training: LocalTraining, records: int) -> None:
    """Refuse local training that would never end."""
    steps = step_count(records, training)
    if training.epochs and steps > MOST_STEPS:
        raise PlanError(
            f"federation.training.epochs = {training.epochs} is up to {steps:,} steps of batch "
            f"size {training.batch_size} on {records:,} records; at most {MOST_STEPS:,} are "
            "allowed: lower epochs, or raise batch_size"
        )
