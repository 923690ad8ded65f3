"""The federation: local training against torch.optim, aggregation by hand, rounds that train."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from nouns import setting
from torch import Tensor, nn

from leakgauge.errors import InputError
from leakgauge.fl import Scenario, aggregate, simulate
from leakgauge.fl.local import advance, loss, minibatches, ready, start, train
from leakgauge.fl.partition import LabelSkew, QuantitySkew
from leakgauge.records import Classes, Images, Scale
from leakgauge.tensors import norm, parameters, subtract
from leakgauge.types import Batch, Dataset, LocalTraining, Named, Setting

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def scaled(model: nn.Module, batch: Batch) -> Setting:
    return setting(model, batch, scale=Scale(MEAN, STD))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_torch(model: nn.Module, batch: Batch, training: LocalTraining) -> nn.Module:
    """The trained model, as a user would write it: modules, backward() and torch.optim.

    Records are normalised by MEAN and STD, and taken in order; `batch_size` must divide them.
    """
    model = copy.deepcopy(model).train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train(training.batch_norm == "train")
        if isinstance(layer, nn.Dropout):
            layer.train(training.dropout == "replayed")
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[training.optimiser]
    options = {"momentum": training.momentum} if training.optimiser == "sgd" else {}
    optimiser = kind(
        model.parameters(), lr=training.lr, weight_decay=training.weight_decay, **options
    )
    mean, std = (batch.inputs.new_tensor(v)[:, None, None] for v in (MEAN, STD))
    chunks = list(zip(batch.inputs.split(training.batch_size),
                      batch.labels.split(training.batch_size), strict=True))  # fmt: skip
    with torch.random.fork_rng():
        for step in range(training.steps):
            inputs, labels = chunks[step % len(chunks)]
            torch.manual_seed(training.dropout_seed + step)
            optimiser.zero_grad()
            F.cross_entropy(model((inputs - mean) / std), labels).backward()
            optimiser.step()
    return model


def moved(before: nn.Module, after: nn.Module) -> Named:
    return subtract(parameters(before), parameters(after))


def assert_same(left: Named, right: Named) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def differ(left: Named, right: Named) -> bool:
    return any(not torch.equal(value, right[name]) for name, value in left.items())


def distance(left: Named, right: Named) -> float:
    """Relative to the right."""
    assert left.keys() == right.keys()
    return norm(subtract(left, right)) / norm(right)


# --- one client: local training ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_one_step_is_the_learning_rate_times_the_gradient(model, batch, rng, mode):
    training = LocalTraining(lr=0.03, batch_size=12, batch_norm=mode)
    model.train()
    model.norm.train(mode == "train")
    model.drop.eval()
    inputs = (batch.inputs - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    copied = copy.deepcopy(model)
    F.cross_entropy(copied(inputs), batch.labels).backward()
    gradient = {name: 0.03 * p.grad for name, p in copied.named_parameters()}
    assert distance(train(scaled(model, batch), batch, training, rng).update, gradient) < 1e-6


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_of_sgd_are_those_of_torch_to_the_last_bit(model, batch, rng, mode, decay, momentum):
    training = LocalTraining(
        lr=0.07, batch_size=4, steps=5, momentum=momentum, weight_decay=decay, batch_norm=mode,
        sends="weights",
    )  # fmt: skip
    after = by_torch(model, batch, training)
    trained = train(scaled(model, batch), batch, training, rng)
    assert_same(trained.update, moved(model, after))
    assert_same(trained.buffers, dict(after.named_buffers()))
    summed = train(scaled(model, batch), batch, replace(training, sends="update"), rng).update
    assert distance(summed, trained.update) < 1e-5


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_of_adam_are_those_of_torch(model, batch, rng, decay):
    # In train mode the gradient of a bias before a batch norm is rounding noise, and Adam divides
    # it by its own size: eval mode in float32, both in float64.
    training = LocalTraining(
        optimiser="adam", lr=0.01, batch_size=4, steps=5, weight_decay=decay, batch_norm="eval",
        sends="weights",
    )  # fmt: skip
    after = by_torch(model, batch, training)
    trained = subtract(parameters(model), train(scaled(model, batch), batch, training, rng).update)
    assert distance(trained, parameters(after)) < 1e-6
    model, batch = model.double(), Batch(batch.inputs.double(), batch.labels)
    for mode in ("eval", "train"):
        training = replace(training, batch_norm=mode)
        moves = moved(model, by_torch(model, batch, training))
        assert distance(train(scaled(model, batch), batch, training, rng).update, moves) < 1e-9


def test_the_modes_of_batch_norm_differ_and_only_train_mode_moves_the_statistics(model, batch, rng):
    training = LocalTraining(batch_size=4, steps=3)
    before = {name: b.clone() for name, b in model.named_buffers()}
    moving = train(setting(model, batch), batch, training, rng)
    still = train(setting(model, batch), batch, replace(training, batch_norm="eval"), rng)
    assert_same(still.buffers, before)
    assert moving.buffers["norm.num_batches_tracked"] == 3
    assert distance({"mean": moving.buffers["norm.running_mean"]},
                    {"mean": before["norm.running_mean"]}) > 0.01  # fmt: skip
    assert distance(moving.update, still.update) > 0.01


def test_sent_weights_are_rounded_and_a_sent_update_is_not(model, batch, rng):
    """A step far below a weight's last digit survives in the update only."""
    training = LocalTraining(lr=1e-7, batch_size=12)
    precise = Batch(batch.inputs.double(), batch.labels)
    exact = train(setting(copy.deepcopy(model).double(), precise), precise, training, rng).update
    as_update = train(setting(model, batch), batch, training, rng).update
    as_weights = train(setting(model, batch), batch, replace(training, sends="weights"), rng).update
    assert distance(as_update, exact) < 1e-5
    assert 1e-2 < distance(as_weights, exact) < 0.5
    for name, weight in parameters(model).items():
        after = weight.double() - as_weights[name].double()
        assert torch.equal(after.float().double(), after)  # a float32 weight is behind it


def test_an_epoch_is_a_pass_over_all_records():
    steps = minibatches(12, LocalTraining(batch_size=5, epochs=2, steps=99))
    assert [len(s) for s in steps] == [5, 5, 2, 5, 5, 2]
    assert torch.equal(torch.cat(steps), torch.arange(12).repeat(2))
    wrapped = minibatches(12, LocalTraining(batch_size=5, steps=4))
    assert torch.equal(torch.cat(wrapped), torch.cat([torch.arange(12), torch.arange(5)]))


def test_epochs_are_as_many_steps(model, batch, rng):
    training = LocalTraining(batch_size=5, epochs=2)
    in_steps = replace(training, epochs=None, steps=6)
    trained = train(setting(model, batch), batch, training, rng).update
    assert_same(trained, train(setting(model, batch), batch, in_steps, rng).update)
    assert differ(
        trained, train(setting(model, batch), batch, replace(in_steps, steps=5), rng).update
    )


def test_a_shuffled_epoch_takes_every_record_once_in_the_order_of_the_generator():
    training = LocalTraining(batch_size=5, epochs=2, order="shuffled")
    first, second = torch.cat(minibatches(12, training, seeded(3))).split(12)
    for order in (first, second):
        assert torch.equal(order.sort().values, torch.arange(12))
        assert not torch.equal(order, torch.arange(12))
    assert not torch.equal(first, second)
    again = torch.cat(minibatches(12, training, seeded(3)))
    assert torch.equal(again, torch.cat([first, second]))
    assert not torch.equal(again, torch.cat(minibatches(12, training, seeded(4))))
    fixed = replace(training, order="fixed")
    assert torch.equal(torch.cat(minibatches(12, fixed, seeded(3)))[:12], torch.arange(12))


def test_training_on_shuffled_records_is_training_on_them_in_that_order(model, batch):
    training = LocalTraining(batch_size=4, steps=3, order="shuffled")
    order = torch.randperm(12, generator=seeded(3))
    placed = Batch(batch.inputs[order], batch.labels[order])
    shuffled = train(setting(model, batch), batch, training, seeded(3)).update
    fixed = replace(training, order="fixed")
    assert_same(shuffled, train(setting(model, placed), placed, fixed, seeded(3)).update)
    assert differ(shuffled, train(setting(model, batch), batch, fixed, seeded(3)).update)


def test_dropout_is_off_or_replayed_from_its_seed(model, batch, rng):
    training = LocalTraining(lr=0.1, batch_size=4, steps=2, sends="weights")
    off = train(scaled(model, batch), batch, training, rng).update
    assert_same(off, moved(model, by_torch(model, batch, training)))

    replayed = replace(training, dropout="replayed", dropout_seed=7)
    first = train(scaled(model, batch), batch, replayed, rng).update
    assert_same(first, moved(model, by_torch(model, batch, replayed)))  # step t: seed 7 + t
    torch.rand(5)  # whatever else is drawn meanwhile
    assert_same(first, train(scaled(model, batch), batch, replayed, rng).update)
    assert differ(first, off)
    assert differ(
        first, train(scaled(model, batch), batch, replace(replayed, dropout_seed=8), rng).update
    )


def test_replayed_dropout_leaves_the_global_generators_alone(model, batch, rng, monkeypatch):
    def refuse(seed: int) -> None:
        raise AssertionError("the generators of the GPUs were reseeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    state = torch.get_rng_state()
    train(
        setting(model, batch), batch, LocalTraining(batch_size=4, steps=2, dropout="replayed"), rng
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_passed_in_is_untouched(model, batch, rng):
    model.eval()
    model.conv.train()
    modes = [layer.training for layer in model.modules()]
    state = copy.deepcopy(model.state_dict())
    train(
        setting(model, batch),
        batch,
        LocalTraining(lr=0.5, batch_size=4, steps=3, dropout="replayed"),
        rng,
    )
    assert_same(dict(model.state_dict()), dict(state))
    assert [layer.training for layer in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_frozen_layer_is_not_in_the_update(model, batch, rng):
    model.conv.requires_grad_(False)
    training = LocalTraining(lr=0.1, batch_size=4, steps=3, sends="weights")
    trained = train(scaled(model, batch), batch, training, rng)
    assert set(trained.update) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert_same(trained.update, moved(model, by_torch(model, batch, training)))


def test_the_update_holds_no_graph(model, batch, rng):
    for optimiser in ("sgd", "adam"):
        training = LocalTraining(batch_size=4, steps=2, optimiser=optimiser, momentum=0.9)
        trained = train(setting(model, batch), batch, training, rng)
        assert not any(
            t.requires_grad for t in [*trained.update.values(), *trained.buffers.values()]
        )


def test_loss_takes_classes_or_probabilities(model, batch):
    training = LocalTraining(batch_norm="eval")
    net, values = setting(ready(model, training), batch), parameters(model)
    as_classes = loss(net, values, batch.inputs, batch.labels, training)
    soft = F.one_hot(batch.labels, 4).float()
    torch.testing.assert_close(loss(net, values, batch.inputs, soft, training), as_classes)
    logits = copy.deepcopy(model).eval()(batch.inputs).double()
    by_hand = -logits.log_softmax(1)[torch.arange(12), batch.labels].mean()
    torch.testing.assert_close(as_classes.double(), by_hand, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(lr=0.1, momentum=0.9, weight_decay=0.1),
        LocalTraining(lr=0.1, optimiser="adam", weight_decay=0.1),
    ],
    ids=["sgd", "adam"],
)
def test_steps_can_be_differentiated(training):
    """The attacker unrolls them; a gradient of zero must not turn into NaN."""
    weights = torch.randn(3, dtype=torch.float64, generator=seeded()).requires_grad_()
    first, second = torch.randn(2, 3, dtype=torch.float64, generator=seeded(1)).requires_grad_()

    def two_steps(weights: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        state = advance(start([weights], training), [first], training)
        state = state.with_tensors(state.tensors())
        state = advance(state, [second], training)
        return state.weights[0], state.moved[0]

    after, update = two_steps(weights, first, second)
    torch.testing.assert_close(weights - after, update)
    assert torch.autograd.gradcheck(two_steps, (weights, first, second))
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    calm = replace(training, weight_decay=0.0)
    state = advance(start([weights], calm), [zero], calm)
    (slope,) = torch.autograd.grad(state.moved[0].sum(), zero)
    assert not state.moved[0].any()
    steepness = {"sgd": 0.1, "adam": 0.1 / 1e-8}  # lr, and lr / ε: there g/(|g| + ε) has this slope
    torch.testing.assert_close(slope, torch.full_like(slope, steepness[training.optimiser]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 13}, "batch_size is 13 but the client trains on 12 records: lower"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"epochs": -1}, "epochs must be at least 1, got -1"),
    ],
)
def test_impossible_sizes_are_refused_in_words(model, batch, rng, changes, words):
    with pytest.raises(InputError, match=words):
        train(setting(model, batch), batch, replace(LocalTraining(), **changes), rng)


# --- the server: aggregation -------------------------------------------------------------------


def test_weights_are_the_shares_of_the_records():
    assert aggregate.weights((1, 3), "records") == (0.25, 0.75)
    assert aggregate.weights((1, 3), "equal") == (0.5, 0.5)
    for sizes in ((), (2, 0)):
        with pytest.raises(InputError, match="at least one record"):
            aggregate.weights(sizes, "records")


def test_fedavg_by_hand():
    before = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([[0.5]])}
    updates = [
        {"w": torch.tensor([4.0, 0.0]), "b": torch.tensor([[1.0]])},
        {"w": torch.tensor([0.0, 8.0]), "b": torch.tensor([[-1.0]])},
    ]
    shares = aggregate.weights((1, 3), "records")
    after = aggregate.step(before, updates, shares, lr=2.0)  # mean: w (1, 6), b −0.5
    assert_same(after, {"w": torch.tensor([-1.0, -10.0]), "b": torch.tensor([[1.5]])})


# --- rounds ------------------------------------------------------------------------------------


def scenario(model: nn.Module, data: Dataset, **options) -> Scenario:
    training = options.pop("training", LocalTraining(lr=0.1, batch_size=4))
    return Scenario(lambda: model, data, training, **options)


def indices(data: Dataset, batch: Batch) -> list[int]:
    """Where its records are in the data set; every one is there, with its label."""
    same = (batch.inputs[:, None] == data.inputs).flatten(2).all(2)
    assert torch.equal(same.sum(1), torch.ones(len(batch), dtype=torch.long))
    found = same.long().argmax(1)
    assert torch.equal(data.labels[found], batch.labels)
    return found.tolist()


@pytest.mark.parametrize("server", [{}, {"server_lr": 0.5}], ids=str)
def test_a_round_is_what_its_clients_did(model, easy, rng, server):
    training = LocalTraining(lr=0.1, batch_size=4, steps=2)
    played = simulate(scenario(model, easy, training=training, clients=3, records=8, **server), rng)
    assert (played.sizes, played.index) == ((8, 8, 8), 0)
    assert (played.record, played.task) == (Images((3, 8, 8)), Classes(4))
    assert_same(dict(played.model.state_dict()), dict(model.state_dict()))
    taken = [i for truth in played.truths for i in indices(easy, truth)]
    assert len(set(taken)) == 24
    for truth, update in zip(played.truths, played.updates, strict=True):
        assert_same(update, train(setting(model, truth), truth, training, rng).update)
    for name, weight in model.named_parameters():
        mean = sum(update[name].double() for update in played.updates) / 3
        by_hand = weight.detach().double() - server.get("server_lr", 1.0) * mean
        torch.testing.assert_close(played.after[name].double(), by_hand, rtol=1e-5, atol=1e-7)


def test_the_next_round_starts_from_the_aggregate_weights_and_statistics(model, easy):
    options = {"clients": 3, "training": LocalTraining(lr=0.1, batch_size=4, steps=2)}
    first = simulate(scenario(model, easy, **options), seeded(5))
    second = simulate(scenario(model, easy, rounds=1, **options), seeded(5))
    assert second.index == 1
    assert_same(parameters(second.model), first.after)
    statistics = [
        train(setting(first.model, t), t, options["training"], seeded()).buffers
        for t in first.truths
    ]
    for name in ("norm.running_mean", "norm.running_var"):
        mean = torch.stack([s[name] for s in statistics]).mean(0)
        torch.testing.assert_close(second.model.get_buffer(name), mean)
        assert not torch.allclose(mean, first.model.get_buffer(name), rtol=1e-2)


def test_rounds_really_train(model, easy):
    losses = []
    training = LocalTraining(lr=0.3, batch_size=4, epochs=1)
    for rounds in (0, 15):
        played = simulate(
            scenario(model, easy, training=training, clients=4, records=8, rounds=rounds), seeded()
        )
        logits = played.model.eval()(easy.inputs)
        losses.append(float(F.cross_entropy(logits, easy.labels).detach()))
    assert losses[1] < losses[0] / 3
    assert (logits.argmax(1) == easy.labels).float().mean() > 0.9


def test_only_the_participants_train(model, easy):
    seen = set()
    for seed in range(12):
        played = simulate(
            scenario(model, easy, clients=4, participants=2, partition=LabelSkew(1)), seeded(seed)
        )
        assert len(played.truths) == len(played.updates) == len(played.weights) == 2
        owners = [set(truth.labels.tolist()) for truth in played.truths]  # client = class
        assert [len(o) for o in owners] == [1, 1]
        assert owners[0] != owners[1]
        seen |= owners[0] | owners[1]
    assert seen == {0, 1, 2, 3}


def test_the_largest_and_the_smallest_federation(model, easy, rng):
    assert simulate(scenario(model, easy), rng).sizes == (4,)
    with pytest.raises(InputError, match="reach only 4"):
        simulate(scenario(model, easy, records=64), rng)
    whole = replace(scenario(model, easy, records=64), training=LocalTraining(batch_size=64))
    assert simulate(whole, rng).sizes == (64,)
    assert simulate(scenario(model, easy, clients=16, participants=16), rng).sizes == (4,) * 16
    assert simulate(scenario(model, easy, clients=16, participants=1), rng).sizes == (4,)


def test_a_frozen_layer_stays_as_it_is_over_the_rounds(model, easy, rng):
    model.conv.requires_grad_(False)
    played = simulate(scenario(model, easy, rounds=2), rng)
    assert torch.equal(played.model.conv.weight, model.conv.weight)
    assert not torch.equal(played.model.head.weight, model.head.weight)
    assert "conv.weight" not in played.after


def test_same_seed_same_round_whatever_the_global_generator_holds(easy):
    def play(seed: int) -> Named:
        made = Scenario(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)),
            easy,
            LocalTraining(lr=0.1, batch_size=4, epochs=1, order="shuffled"),
            clients=3, participants=2, records=8, rounds=2,
        )  # fmt: skip
        played = simulate(made, seeded(seed))
        truth = {"x": played.truths[0].inputs, "y": played.truths[0].labels}
        return parameters(played.model) | played.after | truth

    with torch.random.fork_rng():
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = play(0)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        assert_same(first, play(0))
    other = play(1)
    assert all(not torch.equal(value, other[name]) for name, value in first.items() if name != "y")


def test_the_users_own_model_is_not_trained_and_progress_is_told(model, easy, rng):
    state = copy.deepcopy(model.state_dict())
    calls = []
    simulate(scenario(model, easy, rounds=3), rng, lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert_same(dict(model.state_dict()), dict(state))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"training": LocalTraining(batch_size=65)}, "65 records .* easy has only 64: lower"),
        ({"records": 3}, "batch_size is 4 but the client trains on 3 records"),
        ({"records": 0}, "batch_size is 4 but the client trains on 0 records"),
        ({"clients": 20}, "client 4 holds 3 records of easy but a round takes 4: use fewer"),
        ({"clients": 0}, "0 clients"),
        ({"clients": 3, "participants": 4}, r"participants is 4; expected 1 to 3 \(clients\)"),
        ({"clients": 3, "participants": 0}, "participants is 0; expected 1 to 3"),
        ({"rounds": -1}, "rounds is -1"),
        ({"training": LocalTraining(lr=1e38, batch_size=4, steps=3)},
         "round 0, client 0: its update: .* NaN or infinite .* Lower the learning rate"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused_in_words(model, easy, rng, options, words):
    with pytest.raises(InputError, match=words):
        simulate(scenario(model, easy, **options), rng)


@pytest.mark.parametrize("options", [{"records": 3}, {"participants": 2}, {"rounds": -1}], ids=str)
def test_sizes_are_checked_before_anything_runs(easy, rng, options):
    def make_model() -> nn.Module:
        raise AssertionError("a model was made")

    with pytest.raises(InputError):
        simulate(Scenario(make_model, easy, LocalTraining(batch_size=4), **options), rng)


def test_clients_that_train_on_all_they_hold_weigh_by_it(easy, rng):
    played = simulate(
        Scenario(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(easy.inputs[0].numel(), 4)),
            easy,
            LocalTraining(batch_size=2, epochs=1),
            clients=3,
            records="all",
            partition=QuantitySkew(4, 12),
        ),
        rng,
    )
    assert played.sizes == (4, 8, 12)
    assert played.weights == pytest.approx((4 / 24, 8 / 24, 12 / 24))


def test_a_parameter_that_the_loss_does_not_use_gets_no_update(batch, rng):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(batch.inputs[0].numel(), 4)
            self.idle = nn.Linear(3, 3)

        def forward(self, x):
            return self.head(x.flatten(1))

    update = train(setting(Idle(), batch), batch, LocalTraining(batch_size=len(batch)), rng).update
    assert not update["idle.weight"].any()
    assert update["head.weight"].any()
