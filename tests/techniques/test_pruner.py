"""Sparse training: masks that are those of one device, exact counts, and an all-reduce of what is kept."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.nn import GPT, MLP, FlatParameters, GPTConfig
from minidist.optim import SGD
from minidist.optim.adam import Adam
from minidist.parallel.compressor import compress
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.techniques.pruning.pruner import KeptEntries, Part, Pruner, prunable
from minidist.techniques.pruning.schedule import SparsitySchedule
from minidist.techniques.pruning.selection import keep_largest, magnitude_keys, selection_bytes
from minidist.techniques.quantization.layers import prepare_qat
from tests.cases import each

# --- selection over shards --------------------------------------------------------------------------------------------


def by_sorting(layers, groups, keep):
    """Masks by a stable sort of everything: the oracle."""
    masks = [np.zeros(layer.size, bool) for layer in layers]
    for group, count in enumerate(keep):
        mine = [i for i, g in enumerate(groups) if g == group]
        order = sorted(((i, j) for i in mine for j in range(layers[i].size)), key=lambda at: -abs(layers[at[0]][at[1]]))
        for i, j in order[:count]:
            masks[i][j] = True
    return masks


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]),
    st.booleans(),
    st.integers(0, 99),
    st.data(),
)
def test_any_shards_keep_what_sorting_keeps_for_the_bytes_of_the_closed_form(
    ranks, sizes, whole, dtype, with_equal_ones, seed, data
):
    rng = np.random.default_rng(seed)
    draw = (lambda n: rng.integers(-3, 4, n)) if with_equal_ones else rng.standard_normal
    layers = [np.asarray(draw(n)).astype(dtype) for n in sizes]
    groups = [0] * len(sizes) if whole else list(range(len(sizes)))
    totals = [sum(sizes)] if whole else sizes
    keep = [data.draw(st.integers(0, total)) for total in totals]
    # Each layer is cut at other places: shards of other sizes, some of them empty.
    cuts = [[0, *sorted(rng.integers(0, n + 1, ranks - 1)), n] for n in sizes]

    def main(comm):
        mine = [layer[cut[comm.rank] : cut[comm.rank + 1]] for layer, cut in zip(layers, cuts, strict=True)]
        keys = [magnitude_keys(values) for values in mine]
        return keep_largest(keys, groups, keep, np.dtype(dtype).itemsize, comm if comm.size > 1 else None)

    world = SimWorld(ranks)
    results = world.run(main)
    found = [np.concatenate(masks) for masks in zip(*results, strict=True)]
    for mask, wanted in zip(found, by_sorting(layers, groups, keep), strict=True):
        assert mask.tolist() == wanted.tolist()
    sent = sum(trace.bytes_by_purpose().get("pruning", 0) for trace in world.traces)
    assert sent == selection_bytes(len(sizes), len(keep), np.dtype(dtype).itemsize, ranks)


def test_what_is_pruned_comes_after_a_weight_that_is_zero():
    keys = magnitude_keys(np.array([0.0, 3.0, -0.0]), np.array([True, False, True]))
    assert keys.tolist() == [1, 0, 1]
    assert keep_largest([keys], [0], [2], 8)[0].tolist() == [True, False, True]


# --- the pruner -------------------------------------------------------------------------------------------------------


def parts_of(model):
    return [Part(p.name, p.data.reshape(-1)) for p in model.parameters()]


def test_only_matrices_of_linear_layers_are_pruned():
    model = GPT(GPTConfig(17, 8, 8, 1, 2))
    matrices = prunable(model)
    assert [name.rpartition("h.0.")[2] for name in matrices] == [
        f"{layer}.weight" for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert {matrix.axis for matrix in matrices.values()} == {0}
    assert prunable(prepare_qat(model)) == matrices
    assert {m.axis for m in prunable(MLP([4, 3, 2])).values()} == {1}


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_masks_are_exact_nested_and_never_revive_a_weight(scope):
    model, rng = MLP([20, 30, 10], dtype=np.float64), np.random.default_rng(0)
    matrices, schedule = prunable(model), SparsitySchedule(0.9, 2, 10, 2)
    pruner = Pruner(matrices, schedule, scope)
    before = {name: np.ones(matrix.size, bool) for name, matrix in matrices.items()}
    for done in range(1, 13):
        for part in parts_of(model):  # an optimizer's step: it changes pruned weights, too
            part.values[...] += rng.standard_normal(part.values.size)
        largest = {part.name: np.abs(part.values) for part in parts_of(model)}
        pruner.prune(done, parts_of(model))
        zeros = {part.name: int((part.values == 0).sum()) for part in parts_of(model)}
        sizes = [matrix.size for matrix in matrices.values()]
        wanted = [schedule.pruned(size, done) for size in ([sum(sizes)] if scope == "global" else sizes)]
        counts = [zeros[name] for name in matrices]
        assert wanted == pruner.pruned(done) == ([sum(counts)] if scope == "global" else counts)
        assert not any(zeros[part.name] for part in parts_of(model) if part.name not in matrices)
        if done == 10:  # of the weights that were left, the smallest went
            kept = {name: pruner.masks[name].values for name in matrices}
            went = {name: before[name] & ~kept[name] for name in matrices}
            for names in [list(matrices)] if scope == "global" else [[name] for name in matrices]:
                least = min(largest[name][kept[name]].min() for name in names)
                assert max(largest[name][went[name]].max(initial=0) for name in names) <= least
        for name, mask in pruner.masks.items():
            assert not (mask.values & ~before[name]).any()
            before[name] = mask.values


def test_a_pattern():
    model = MLP([8, 12, 4], dtype=np.float64)
    pruner = Pruner(prunable(model), SparsitySchedule(0.5, 1, 1), pattern=(2, 4))
    pruner.prune(1, parts_of(model))
    for layer in model.layers:
        assert ((layer.weight.data.reshape(-1, 4) != 0).sum(axis=1) == 2).all()


# --- with data parallelism --------------------------------------------------------------------------------------------

ROWS, STEPS = 12, 7
INPUTS = np.random.default_rng(0).standard_normal((STEPS, ROWS, 6))
TARGETS = np.random.default_rng(1).integers(0, 4, (STEPS, ROWS))


def make(scope, pattern):
    model = MLP([6, 8, 4], dtype=np.float64) if pattern is None else MLP([6, 9, 4], dtype=np.float64)
    final = 0.8 if pattern is None else 2 / 3
    schedule = SparsitySchedule(final, 2, 6, 2) if pattern is None else SparsitySchedule(final, 2, 2)
    return model, Pruner(prunable(model), schedule, scope, pattern)


def on_one_device(ranks, scope, pattern, optimizer):
    model, pruner = make(scope, pattern)
    flat = FlatParameters(model.parameters())
    optimizer = optimizer(flat, lr=0.1)
    for step in range(STEPS):
        flat.zero_grad()
        for rows in np.array_split(np.arange(ROWS), ranks):
            cross_entropy(model(Tensor(INPUTS[step][rows])), TARGETS[step][rows], divisor=ROWS).backward()
        pruner.apply([Part(p.name, p.grad.reshape(-1)) for p in flat.parameters])
        optimizer.step()
        pruner.prune(step + 1, parts_of(model))
        flat.updated()
    return flat.data


def on_ranks(comm, scope, pattern, optimizer, algorithm="ordered"):
    model, pruner = make(scope, pattern)
    ddp = DistributedDataParallel(model, comm, reduction="sum", bucket_cap_mb=0.0004)
    hook = KeptEntries(comm, pruner, "sum", algorithm)
    ddp.register_comm_hook(hook, compress)
    optimizer, rows, formula = optimizer(ddp.flat, lr=0.1), np.array_split(np.arange(ROWS), comm.size)[comm.rank], 0
    for step in range(STEPS):
        ddp.flat.zero_grad()
        formula += sum(hook.sent_bytes(bucket, comm.rank) for bucket in ddp.reducer.buckets)
        cross_entropy(ddp(Tensor(INPUTS[step][rows])), TARGETS[step][rows], divisor=ROWS).backward()
        optimizer.step()
        pruner.prune(step + 1, parts_of(model))
        ddp.flat.updated()
    assert len(ddp.reducer.buckets) > 1
    return ddp.flat.data.copy(), formula


@each(("scope", "pattern"), [("layer", None), ("global", None), ("layer", (1, 3))])
@each("optimizer", [SGD, Adam])
@each("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_has_the_bits_of_one_device_and_sends_what_is_kept(ranks, optimizer, scope, pattern):
    weights, world = on_one_device(ranks, scope, pattern, optimizer), SimWorld(ranks)
    results = world.run(on_ranks, scope, pattern, optimizer)
    for trace, (mine, formula) in zip(world.traces, results, strict=True):
        assert np.array_equal(mine, weights)
        assert trace.bytes_by_purpose().get("gradient_reduce", 0) == formula
    assert "pruning" not in world.traces[0].bytes_by_purpose()  # equal weights, equal masks, no message

    # In closed form: the schedule alone says how much all ranks together send.
    pruner = make(scope, pattern)[1]
    kept = [weights.size - sum(pruner.pruned(step)) for step in range(STEPS)]
    assert sum(formula for _, formula in results) == 2 * (ranks - 1) * sum(kept) * 8
    assert kept[0] == weights.size
    assert kept[-1] < 0.5 * weights.size


def test_with_the_ring_it_is_the_same_up_to_rounding():
    weights = on_one_device(3, "layer", None, SGD)
    world = SimWorld(3)
    results = world.run(on_ranks, "layer", None, SGD, "ring")
    for trace, (mine, formula) in zip(world.traces, results, strict=True):
        np.testing.assert_allclose(mine, weights, rtol=0, atol=1e-13)
        assert trace.bytes_by_purpose()["gradient_reduce"] == formula
