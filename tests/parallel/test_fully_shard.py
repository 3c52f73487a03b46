"""fully_shard equals data parallelism that reduces every micro-batch, bit for bit; its bytes, peaks and times are
closed forms.
"""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import collectives
from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core import autograd
from minidist.core.autograd import Parameter, Tensor, backward_hook
from minidist.core.base.errors import UsageError
from minidist.core.comm import init_device_mesh
from minidist.core.nn import Linear, Module, Sequential
from minidist.core.optim import AdamW
from minidist.core.parallel.fsdp import FSDPState, FSDPUnit, fully_shard, sharded_parameters, shards_of, units_of
from minidist.nn import checkpoint
from minidist.optim import SGD
from minidist.parallel import CPUOffloadPolicy, HostPool, gather_tensors
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.shards import clip_shards_
from minidist.parallel.unreduced import UnusedParameterError
from minidist.planning import block_bytes
from tests.cases import each
from tests.parallel.models import LENGTH, ROWS, add_in_order, assert_same, loss_of, one_device, small_gpt

OPTIMIZERS = {"adam": (AdamW, {"lr": 0.01, "weight_decay": 0.1}), "sgd": (SGD, {"lr": 0.1, "momentum": 0.9})}
FROZEN = ("wpe", "h.0.mlp", "h.1", "ln_f")


def shard_gpt(model, mesh, **settings):
    """The blocks, then the rest."""
    for module in [*model.transformer.h, model]:
        fully_shard(module, mesh=mesh, **{"reduction": "sum", "algorithm": "ordered", **settings})
    return model


def units(model):
    """The parameters of the units that `shard_gpt` makes, in the order of `shards_of`."""
    blocks = [list(block.parameters()) for block in model.transformer.h]
    inside = {p for block in blocks for p in block}
    return [[p for p in model.parameters() if p not in inside], *blocks]


def train(
    comm,
    optimizer="adam",
    local=2,
    steps=2,
    clip=None,
    frozen=(),
    recompute=False,
    mesh_shape=None,
    offload=False,
    deferred=False,
    **settings,
):
    """Train; this rank's view of all tensors."""
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(HostPool(comm))
    kind, defaults = OPTIMIZERS[optimizer]
    mesh = init_device_mesh(comm, mesh_shape, ("replicate", "shard")) if mesh_shape else comm
    model = shard_gpt(small_gpt(frozen=frozen), mesh, **settings)
    if recompute:
        for block in model.transformer.h:
            block.forward = lambda x, inner=block.forward: checkpoint(inner, x)
    shards, stepper = shards_of(model), kind(sharded_parameters(model), **defaults)
    for step in range(steps):
        for shard in shards:
            shard.zero_grad()
        for i in range(local):
            loss = loss_of(model, step, comm.rank * local + i, comm.size * local)
            if deferred:
                autograd.backward(loss, weight_gradients="deferred").run()
            else:
                loss.backward()
        if clip is not None:
            clip_shards_(shards[0].comm, shards, clip)
        stepper.step()
    return gather_tensors(shards, stepper)


@cache
def expected(ranks, optimizer="adam", local=2, steps=2, clip=None, frozen=(), add=add_in_order):
    """What one device computes, once for all tests that ask for it."""
    kind, settings = OPTIMIZERS[optimizer]
    model = small_gpt(frozen=frozen)
    return one_device(lambda flat: kind(flat, **settings), ranks, local, True, steps, clip, model, units, add)


@each("ranks", [1, 2, 3, 4, 5, 8], sampled=12)
@each("optimizer", ["adam", "sgd"])
def test_it_equals_one_device_bit_for_bit(optimizer, ranks):
    right = expected(ranks, optimizer, clip=0.3)
    for result in SimWorld(ranks).run(train, optimizer, clip=0.3):
        assert_same(result, right)


@pytest.mark.parametrize("settings", [{}, {"recompute": True, "persistence_threshold": 50}, {"offload": True}])
def test_deferred_weight_gradients_are_reduced_when_they_are_there(settings):
    right = expected(3)
    for result in SimWorld(3).run(train, deferred=True, **settings):
        for kind in ("weights", "gradients"):
            for name, values in right[kind].items():
                assert np.array_equal(result[kind][name], values)


def test_deferred_gradients_of_one_unit_are_whole_while_another_travels():
    def main(comm):
        layers = [fully_shard(Linear(64, 64, bias=False), mesh=comm) for _ in range(6)]
        model = fully_shard(Sequential(*layers, Linear(64, 1, bias=False)), mesh=comm)
        with account_memory() as account:
            store = autograd.backward(
                model(Tensor(np.ones((2, 64), np.float32), requires_grad=True)).sum() * 1.0, weight_gradients="deferred"
            )
            before = account.by_purpose.get("gradient", 0)
            store.run()
        return before, account.peak_by_purpose["gradient"]

    unit, shards = 4 * 64 * 64, 6 * 4 * 64 * 64 // 2 + 4 * 1024
    for before, most in SimWorld(2).run(main):
        assert before == 0
        assert most <= shards + 2 * unit


def test_a_weight_without_a_deferred_gradient_is_named():
    def branch(comm):
        model = shard_branches(comm, False)
        store = autograd.backward(model(Tensor(np.ones((4, 3))), False), weight_gradients="deferred")
        with pytest.raises(UnusedParameterError, match=r"'right\.\w+' got no gradient"):
            store.run()

    SimWorld(2).run(branch)


@settings(max_examples=10)
@given(
    ranks=st.integers(1, 8),
    alignment=st.sampled_from([1, 7, 64]),
    prefetch=st.integers(0, 3),
    frozen=st.booleans(),
    keep=st.booleans(),
    threshold=st.sampled_from([0, 13, 10**6]),
    recompute=st.booleans(),
    offload=st.booleans(),
)
def test_no_setting_changes_a_bit(ranks, alignment, prefetch, frozen, keep, threshold, recompute, offload):
    parts = FROZEN if frozen else ()
    right = expected(ranks, frozen=parts)
    results = SimWorld(ranks).run(
        train,
        alignment=alignment,
        prefetch=prefetch,
        frozen=parts,
        reshard_after_forward=not keep,
        persistence_threshold=threshold,
        recompute=recompute,
        offload=offload,
    )
    for result in results:
        assert_same(result, right)


def test_frozen_parameters_with_clipping():
    for result in SimWorld(3).run(train, clip=0.3, frozen=FROZEN):
        assert_same(result, expected(3, clip=0.3, frozen=FROZEN))


@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (2, 1), (2, 2), (2, 3), (4, 2)])
def test_hybrid_sharding_adds_over_the_shards_first_and_then_over_the_replicas(replicas, shards):
    def nested(sites, order):
        rows = [[sites[r * shards + s] for s in range(shards)] for r in range(replicas)]
        return fold([fold([fold(contributions) for contributions in row]) for row in rows])

    def fold(parts):
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total

    right = expected(replicas * shards, local=1, add=nested)
    for result in SimWorld(replicas * shards).run(train, local=1, mesh_shape=(replicas, shards)):
        assert_same(result, right)


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (8, 4), (6, 3)])
def test_resharding_to_a_group_gathers_for_backward_among_neighbours(ranks, group):
    world = SimWorld(ranks)
    for result in world.run(train, reshard_after_forward=group, local=1, steps=1):
        assert_same(result, expected(ranks, local=1, steps=1))
    psi = padded_bytes(ranks)
    for trace in world.traces:
        whole, part = psi * (ranks - 1) // ranks, psi * (group - 1) // group
        assert trace.bytes_by_purpose()["parameter_gather"] == whole + part
        inside = [m for m in trace.sent("parameter_gather") if m.peer // group == trace.rank // group]
        assert sum(m.nbytes for m in inside) >= part


def padded_bytes(ranks, layers=2):
    """Bytes of all units, each padded to shards of a multiple of 1,024 elements."""
    sizes = [sum(p.size for p in unit) for unit in units(small_gpt(layers=layers))]
    return sum(-(-size // (1024 * ranks)) * 1024 * ranks for size in sizes) * 4


# memory ---------------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 12


def peaks(comm, prefetch):
    """(account, bytes of each unit, bytes of this rank's trainable elements, of the largest piece of them) after three
    steps.
    """
    with account_memory() as account:
        model = shard_gpt(small_gpt(layers=LAYERS), comm, prefetch=prefetch, algorithm="ring")
        stepper, shards = AdamW(sharded_parameters(model)), shards_of(model)
        for step in range(3):
            for shard in shards:
                shard.zero_grad()
            loss_of(model, step, comm.rank, comm.size).backward()
            stepper.step()
        owned = [sum(piece.stop - piece.start for piece in shard.slices()) * 4 for shard in shards]
        return account, [shard.flat.padded_numel * 4 for shard in shards], sum(owned), max(owned)


def at_the_peak(units, owned, largest, ranks, prefetch, blocks_done):
    """All that is alive, by purpose, when the first weight gradient of a block (after `blocks_done` blocks) makes its
    buffer.
    """
    root, block = units[0], units[1]
    rows = ROWS * LENGTH
    return {
        "parameter": sum(units) // ranks,
        "optimizer": 2 * owned,  # two moments; none for padding
        "workspace": largest,  # the optimizer's block
        # the root all the time; the block; those ahead
        "unsharded": root + (1 + min(prefetch, LAYERS - 1 - blocks_done)) * block,
        # sums; the tied root's, the block's, one leaving
        "gradient": sum(units) // ranks + root + (1 + min(1, blocks_done)) * block,
        # what the blocks that are left keep; the loss, the tokens and the positions
        "activation": (
            (LAYERS - blocks_done) * block_bytes.fused(LENGTH, ROWS, WIDTH, 2)
            + 4
            + 8 * ROWS * (LENGTH + 1)
            + 8 * LENGTH
        ),
        # of the loss, the block's output, its inner width
        "activation_gradient": 4 + 4 * rows * WIDTH + 4 * rows * 4 * WIDTH,
    }


def check_peaks(ranks, prefetch):
    for account, units, owned, largest in SimWorld(ranks).run(peaks, prefetch):
        assert len(set(units[1:])) == 1
        named = max(
            (at_the_peak(units, owned, largest, ranks, prefetch, done) for done in (0, 1)),
            key=lambda part: sum(part.values()),
        )
        found = {purpose: nbytes for purpose, nbytes in account.at_peak.items() if nbytes}
        # The ring's buffers of a reduction that has not ended: none, one or two chunks.
        receiving = found.pop("communication", 0)
        assert receiving in (0, units[1] // ranks, 2 * units[1] // ranks)
        for purpose, nbytes in named.items():
            assert found.pop(purpose, 0) == nbytes, purpose
        assert not found
        assert account.peak == sum(named.values()) + receiving
        assert account.peak_by_purpose["unsharded"] == units[0] + (1 + min(prefetch, LAYERS - 1)) * units[1]
        assert account.peak_by_purpose["gradient"] == sum(units) // ranks + units[0] + 2 * units[1]
        assert account.by_purpose["unsharded"] == 0  # nothing stays whole


@each("prefetch", [0, 1, 2], sampled=6)
@each("ranks", [1, 2, 4])
def test_the_peak_is_the_closed_form_to_the_byte(ranks, prefetch):
    check_peaks(ranks, prefetch)


@each("ranks", [1, 2, 4])
@each("local", [1, 2])
def test_offloaded_shards_are_transferred_with_each_gather_and_reduction(local, ranks):
    """To the device: a shard before each of two gathers per micro-batch. To the host: its gradient after each.

    An element has 4 bytes each time.
    """

    def main(comm):
        pool = HostPool(comm)
        with account_memory() as account:
            model = shard_gpt(small_gpt(layers=LAYERS), comm, offload_policy=CPUOffloadPolicy(pool))
            stepper, shards = AdamW(sharded_parameters(model)), shards_of(model)
            for _ in range(2):
                for shard in shards:
                    shard.zero_grad()
                for i in range(local):
                    loss_of(model, 0, comm.rank * local + i, comm.size * local).backward()
                with pool.on_host():
                    stepper.step()
            mine = sum(shard.size for shard in shards) * 4
            owned = sum(piece.stop - piece.start for shard in shards for piece in shard.slices()) * 4
            return pool, mine, owned, *({p: n for p, n in a.by_purpose.items() if n} for a in (account, pool.account))

    for pool, mine, owned, left, held in SimWorld(ranks).run(main):
        assert pool.to_device == 2 * 2 * local * mine
        assert pool.to_host == 2 * local * mine
        assert not {"parameter", "gradient", "optimizer", "unsharded", "communication"} & set(left)
        held.pop("workspace", None)  # one block of the optimizer's
        assert held == {"parameter": mine, "gradient": mine, **({"optimizer": 2 * owned} if owned else {})}


# time -----------------------------------------------------------------------------------------------------------------


class Timed(Module):
    """A layer that takes `seconds` to compute, in forward and in backward."""

    def __init__(self, seconds, elements):
        self.seconds, self.weight, self.comm = seconds, Parameter(np.ones(elements, np.float32)), None

    def forward(self, x):
        self.comm.compute(seconds=self.seconds, name="F")
        y = x * self.weight.sum()
        return backward_hook(y, lambda _: self.comm.compute(seconds=self.seconds, name="B"))


def timed_step(comm, prefetch, seconds, layers, elements, **settings):
    """Virtual seconds of the second step (the first one learns the order): (forward, backward)."""
    model = Sequential(*[Timed(seconds, elements) for _ in range(layers)])
    for i, layer in enumerate(model.layers):
        layer.comm, layer.name, layer.weight.name = comm, f"layers.{i}", f"layers.{i}.weight"
        fully_shard(layer, mesh=comm, prefetch=prefetch, **settings)
    fully_shard(model, mesh=comm, prefetch=prefetch, **settings)

    def together(moment):
        comm.compute(seconds=moment - comm.time(), name="wait")  # ranks that differ by a microsecond begin at once
        return moment

    for step in range(2):
        start = together(4 * step + 1)
        out = model(Tensor(np.ones(1, np.float32), requires_grad=True))
        forward = comm.time() - start
        start = together(4 * step + 3)
        out.backward(np.ones(1, np.float32))
        backward = comm.time() - start
    return forward, backward


@settings(max_examples=25)
@given(ratio=st.sampled_from([0.25, 0.9, 1.0, 1.5, 4.0]), ranks=st.integers(2, 4), prefetch=st.integers(0, 3))
def test_prefetch_hides_the_gather_whenever_computing_takes_as_long(ratio, ranks, prefetch):
    layers, elements, alpha, beta = 5, 1024 * ranks, 1e-6, 1e-9
    gather = collectives.seconds("all_gather", "ring", elements * 4, ranks, alpha, beta)
    seconds = ratio * gather
    results = SimWorld(ranks, links=LinkModel(alpha, beta)).run(timed_step, prefetch, seconds, layers, elements)
    for forward, backward in results:
        if prefetch == 0:
            assert forward == pytest.approx(layers * (gather + seconds))
            assert backward == pytest.approx(layers * (gather + seconds) + gather)
        elif ratio >= 1:
            assert forward == pytest.approx(gather + layers * seconds)  # only the first gather shows
            assert backward == pytest.approx(gather + layers * seconds + gather)  # and the last reduction
        else:
            assert forward == pytest.approx(layers * gather + seconds)  # the wire is the limit


@settings(max_examples=15)
@given(ratio=st.sampled_from([0.5, 1.0, 2.0]), ranks=st.integers(2, 4), prefetch=st.integers(1, 3))
def test_prefetch_hides_the_link_to_the_host_too(ratio, ranks, prefetch):
    """A shard is transferred in one stream and gathered in another: hidden when a layer computes as long as both,
    and with two layers ahead as long as the slower of the two (here the gather; the link takes `ratio` of it).
    """
    layers, elements, alpha, beta = 5, 1024 * ranks, 1e-6, 1e-9
    gather = collectives.seconds("all_gather", "ring", elements * 4, ranks, alpha, beta)
    link = ratio * gather
    seconds = gather + link if prefetch == 1 else max(gather, link)

    def main(comm):
        pool = HostPool(comm, bandwidth=4 * 1024 / link)
        return timed_step(comm, prefetch, seconds, layers, elements, offload_policy=CPUOffloadPolicy(pool))

    for forward, backward in SimWorld(ranks, links=LinkModel(alpha, beta)).run(main):
        assert forward == pytest.approx(link + gather + layers * seconds)  # only the first one shows
        # and at the end the last reduction next to the way down of the gradient before it, then that of the last one
        assert backward == pytest.approx(link + gather + layers * seconds + max(gather, link) + link)


def test_backward_gathers_the_last_block_while_the_rest_of_the_model_computes(monkeypatch):
    """Backward reaches modules in the reversed order in which forwards ended: the outermost module comes first."""
    log = []
    gather, reached = FSDPUnit.start_gather, FSDPState._pre_backward

    def logged_gather(unit, root):
        inside = unit.flat.names[0].startswith("transformer.h.")
        log.append(f"gather {unit.flat.names[0][: len('transformer.h.0')] if inside else ''}")
        gather(unit, root)

    def logged_reached(state, running):
        log.append(f"reached {state.module.name}")
        reached(state, running)

    monkeypatch.setattr(FSDPUnit, "start_gather", logged_gather)
    monkeypatch.setattr(FSDPState, "_pre_backward", logged_reached)

    def main(comm):
        model = shard_gpt(small_gpt(), comm, prefetch=1)
        loss = loss_of(model, 0, 0, 1)
        log.clear()
        loss.backward()

    SimWorld(1).run(main)
    blocks = "transformer.h.0", "transformer.h.1"
    assert log == [
        "reached ",
        "gather ",
        f"gather {blocks[1]}",
        f"reached {blocks[1]}",
        f"gather {blocks[1]}",
        f"gather {blocks[0]}",
        f"reached {blocks[0]}",
        f"gather {blocks[0]}",
    ]


# errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reduction": "max"}, "'mean' or 'sum'"),
        ({"prefetch": -1}, "prefetch=-1; it must be a whole number of at least 0"),
        ({"reshard_after_forward": 3}, "a number must divide them"),
        ({"alignment": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_one_sentence(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        SimWorld(4).run(lambda comm: shard_gpt(small_gpt(), comm, **settings))


def test_sharding_twice_is_an_error_and_so_is_not_sharding():
    with pytest.raises(UsageError, match="sharded already"):
        SimWorld(1).run(lambda comm: shard_gpt(shard_gpt(small_gpt(), comm), comm))
    with pytest.raises(UsageError, match=r"call fully_shard\(module, mesh=comm\) first"):
        sharded_parameters(small_gpt())


def test_evaluation_leaves_no_unit_gathered():
    def main(comm):
        from minidist.core.autograd import no_grad

        with account_memory() as account, no_grad():
            model = shard_gpt(small_gpt(), comm, reshard_after_forward=False)
            loss_of(model, 0, 0, 1)
            return account.by_purpose["unsharded"]

    assert SimWorld(2).run(main) == [0, 0]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (1, 3)])
def test_hybrid_sharding_with_the_mean_is_the_mean_over_all_ranks(shape):
    """Also over the copies: the gradient of data parallelism with reduction="mean", up to rounding."""

    def gradients(comm, hybrid):
        model = Sequential(Linear(4, 6, dtype=np.float64), Linear(6, 3, dtype=np.float64)).initialize(1)
        x = Tensor(np.random.default_rng(comm.rank).standard_normal((5, 4)))
        if not hybrid:
            ddp = DistributedDataParallel(model, comm)
            ddp(x).sum().backward()
            return {p.name: p.grad for p in model.parameters()}
        fully_shard(model, mesh=init_device_mesh(comm, shape, ("replicate", "shard")))
        model(x).sum().backward()
        return gather_tensors(shards_of(model), SGD(sharded_parameters(model), lr=1.0))["gradients"]

    world = SimWorld(shape[0] * shape[1])
    for mine, expected in zip(world.run(gradients, True), world.run(gradients, False), strict=True):
        for name in expected:
            np.testing.assert_allclose(mine[name], expected[name], rtol=1e-12, err_msg=name)


class TwoBranches(Module):
    def __init__(self):
        self.left, self.right = (Linear(3, 2, dtype=np.float64) for _ in range(2))
        self.initialize(4)

    def forward(self, x, both):
        return self.left(x).sum() + (self.right(x).sum() if both else 0.0)


def shard_branches(comm, apart, **settings):
    model = TwoBranches()
    for part in [model.left, model.right] if apart else []:
        fully_shard(part, mesh=comm, **settings)
    return fully_shard(model, mesh=comm, **settings)


@pytest.mark.parametrize("apart", [False, True])
def test_the_pass_after_an_unused_parameter_error_begins_anew(apart):
    def program(comm, fails):
        model = shard_branches(comm, apart)
        x = Tensor(np.random.default_rng(comm.rank).standard_normal((4, 3)))
        if fails:
            with pytest.raises(
                UnusedParameterError, match=r"'right\.\w+' got no gradient.*find_unused_parameters=True"
            ):
                model(x, False).backward()
            model.zero_grad()
        model(x, True).backward()
        return gather_tensors(shards_of(model), SGD(sharded_parameters(model), lr=1.0))["gradients"]

    expected = SimWorld(2).run(program, False)
    for mine, theirs in zip(SimWorld(2).run(program, True), expected, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


class StopsOnce(Module):
    """Its first backward raises an error, if it `fails`."""

    def __init__(self, fails):
        self.fails = fails

    def forward(self, x):
        return backward_hook(x, self.stop)

    def stop(self, running):
        if self.fails:
            self.fails = False
            raise ValueError("stopped")


def test_the_pass_after_an_error_in_the_middle_of_a_backward_begins_anew():
    """When it happens, the last unit is reduced and a part of the first one has its gradients."""

    def program(comm, fails):
        first, second, last = (Linear(16, 16) for _ in range(3))
        unit = fully_shard(Sequential(first, StopsOnce(fails), second), mesh=comm)
        model = fully_shard(Sequential(unit, fully_shard(last, mesh=comm), Linear(16, 1)), mesh=comm)
        x = Tensor(np.random.default_rng(comm.rank).standard_normal((4, 16)).astype(np.float32))
        if fails:
            with pytest.raises(ValueError, match="stopped"):
                model(x).sum().backward()
            model.zero_grad()
        # What is whole after the error must not be what the next pass computes with.
        for parameter in sharded_parameters(model):
            parameter.data[...] *= 0.5
        model(x).sum().backward()
        whole = [not unit.flat.released for unit in units_of(model)]
        return [parameter.grad for parameter in sharded_parameters(model)], whole

    expected = SimWorld(2).run(program, False)
    for (mine, whole), (theirs, _) in zip(SimWorld(2).run(program, True), expected, strict=True):
        assert all(map(np.array_equal, mine, theirs))
        assert all(gradient.any() for gradient in theirs if gradient.size)
        assert not any(whole)


def test_an_unknown_option_is_named_with_the_nearest_one():
    with pytest.raises(
        UsageError, match=r"no option 'algoritm' \(did you mean 'algorithm'\?\); there are mesh, reshard"
    ):
        SimWorld(2).run(lambda comm: fully_shard(small_gpt(), mesh=comm, algoritm="ring"))
