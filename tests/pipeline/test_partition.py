"""The partitioner against brute force, and its sentences."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.pipeline.partition import Layer, Stage, by_cost, by_slowest, partition, pipedream, read_profile, uniform

COSTS = st.lists(st.floats(0, 9), min_size=1, max_size=6)
LAYERS = st.lists(
    st.builds(Layer, st.just("x"), *[st.floats(0, 9)] * 2, *[st.integers(0, 50).map(float)] * 2), min_size=1, max_size=5
)


def cuts(n, parts):
    for inner in itertools.combinations(range(1, n), parts - 1):
        bounds = (0, *inner, n)
        yield list(itertools.pairwise(bounds))


def slowest_of(layers, blocks, shares, bandwidth, objective, memory=float("inf")):
    """The seconds of the slowest stage or link of one cut; infinite where a block does not fit."""
    slowest, n = 0.0, len(layers)
    for number, ((a, b), k) in enumerate(zip(blocks, shares, strict=True)):
        block = layers[a:b]
        compute = sum(x.fwd_ms + x.bwd_ms for x in block) / 1000
        sync = 4 * (k - 1) * sum(x.param_bytes for x in block) / (bandwidth * k)
        before = 2 * layers[a - 1].act_bytes / bandwidth if a else 0
        after = 2 * layers[b - 1].act_bytes / bandwidth if a and b < n else 0
        if objective == "paper":
            slowest = max(slowest, max(compute, sync) / k, before)
        else:  # optimizer_graph_hierarchical.py: input_transfer_time, output_transfer_time
            slowest = max(slowest, (compute + sync) / k, before / k, after / k)
        copies = -(-sum(shares[number:]) // k)
        if copies * sum(x.act_bytes + x.param_bytes for x in block) > memory:
            slowest = float("inf")
    return slowest


def brute_force(layers, machines, bandwidth, objective, memory):
    """All ways to cut and all ways to share out the machines."""
    return min(
        slowest_of(
            layers, blocks, [b - a for a, b in itertools.pairwise((0, *inner, machines))], bandwidth, objective, memory
        )
        for parts in range(1, min(len(layers), machines) + 1)
        for blocks in cuts(len(layers), parts)
        for inner in itertools.combinations(range(1, machines), parts - 1)
    )


# There is room where the copies of a stage are rounded down, and none where they are rounded up.
NO_ROOM = [Layer("x", 0.0, 0.0, *sizes) for sizes in ((18.0, 0.0), (31.0, 25.0), (17.0, 10.0), (0.0, 5.0))]
# 10 s leave the second stage, on one machine, and enter the third, on two of them; the stages compute for 9 s.
MIDDLE = [Layer("a", 0, 9000, 0, 1e12), Layer("b", 0, 9000, 5000.0, 1e12), Layer("c", 0, 8000, 0, 0)]


@settings(max_examples=100)
@example(NO_ROOM, 3, "released", 200.0)
@example(MIDDLE, 4, "released", 1e15)
@given(LAYERS, st.integers(1, 4), st.sampled_from(["released", "paper"]), st.sampled_from([1e9, 200.0]))
def test_pipedream_finds_the_best_of_all(layers, machines, objective, memory):
    expected = brute_force(layers, machines, 1000.0, objective, memory)
    if expected == float("inf"):
        with pytest.raises(UsageError, match="fits in"):
            pipedream(layers, machines, 1000.0, objective, memory)
        return
    found = pipedream(layers, machines, 1000.0, objective, memory)
    assert found.slowest_stage_seconds == pytest.approx(expected)
    assert sum(stage.replicas for stage in found.stages) == machines
    assert [x for s in found.stages for x in range(s.first, s.last + 1)] == list(range(len(layers)))


def vgg16(batch, flops):
    """VGG-16 by layers, from its architecture (Simonyan and Zisserman, 2015, table 1, column D), at `flops` FLOP/s."""
    layers, size, channels = [], 224, 3  # (name, FLOPs of forward, outputs, weights) per image
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            weights, outputs = 9 * channels * width, width * size * size
            layers.append(("conv", 2 * weights * size * size, outputs, weights))
            channels = width
        size //= 2
        layers.append(("pool", outputs, outputs // 4, 0))
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        layers.append(("linear", 2 * inputs * outputs, outputs, inputs * outputs))
    ms = 1000 * batch / flops
    return [Layer(op, ms * work, 2 * ms * work, 4.0 * batch * out, 4.0 * weights) for op, work, out, weights in layers]


@pytest.mark.parametrize(("batch", "flops", "replicas"), [(128, 12e12, [13, 2, 1]), (32, 3e12, [10, 2, 3, 1])])
def test_the_partition_of_vgg16_on_16_machines(batch, flops, replicas):
    """Convolutions on most machines, and the layers with nearly all weights on one, as in PipeDream's paper.

    From the profile that its authors have published the released program makes 13-2-1, too. The second case needs the
    boundary behind a stage, and both need it shared by the machines of the stage.
    """
    layers = vgg16(batch, flops)
    assert sum(layer.param_bytes for layer in layers) == 4 * 138_344_128  # of its 138 million, all but the biases
    found = pipedream(layers, 16, 1e9)
    assert [stage.replicas for stage in found.stages] == replicas
    blocks = [(stage.first, stage.last + 1) for stage in found.stages]
    assert found.slowest_stage_seconds == pytest.approx(slowest_of(layers, blocks, replicas, 1e9, "released"))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 7))
def test_cuts_are_the_best_of_all(costs, parts):
    if parts > len(costs):
        with pytest.raises(UsageError, match="take at most"):
            by_cost(costs, parts)
        return
    for function, value in ((by_cost, lambda sums: sum(s * s for s in sums)), (by_slowest, max)):
        sums = [sum(costs[s.first : s.last + 1]) for s in function(costs, parts)]
        assert len(sums) == parts
        assert value(sums) == min(value([sum(costs[a:b]) for a, b in blocks]) for blocks in cuts(len(costs), parts))


def test_uniform():
    assert uniform(5, 2) == [Stage(0, 2), Stage(3, 4)]


def test_profiles(tmp_path):
    layer = {"op": "x", "fwd_ms": 1, "bwd_ms": 2, "act_bytes": 3, "param_bytes": 4}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profiles": {"net": [layer]}}))
    assert read_profile(f"{path}:net") == [Layer("x", 1, 2, 3, 4)]
    path.write_text(json.dumps({"net": [layer], "other": [layer]}))
    assert read_profile(f"{path}:net") == [Layer("x", 1, 2, 3, 4)]
    for source, content, sentence in [
        (f"{path}:nett", {"net": [layer]}, "has no profile 'nett' .did you mean 'net'"),
        (str(path), {"net": [layer]}, "holds several profiles; write FILE:NAME with one of net"),
        (str(path), [], "not empty"),
        (str(path), [{**layer, "fwd_ms": -1}], "layer 0: fwd_ms is -1"),
        (str(path), [7], "layer 0 is 7"),
        (str(path) + "x", [], "cannot be read"),
    ]:
        path.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=sentence):
            read_profile(source)
    for arguments, sentence in [
        ((0, 1.0), "--machines is 0"),
        ((1, 0.0), "--bandwidth is 0"),
        ((1, 1.0, "papers"), "did you mean 'paper'"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            pipedream([Layer("x", 1, 1, 1, 1)], *arguments)


def test_numbers_too_large_are_one_sentence(tmp_path):
    layer = '{"fwd_ms": %s, "bwd_ms": 1, "act_bytes": 1, "param_bytes": 1}'
    path = tmp_path / "large.json"
    for text in (f"[{layer % '1e308'}]", f"[{layer % ('1' + 400 * '0')}]", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"below 1e\+30|is not JSON"):
            read_profile(str(path))
    with pytest.raises(UsageError, match="use at most 200000"):
        pipedream([Layer("", 1, 1, 1, 1)], 1_000_000, 1e9)
    with pytest.raises(UsageError, match="--memory-limit is nan"):
        pipedream([Layer("", 1, 1, 1, 1)], 2, 1e9, memory_limit=float("nan"))


def test_methods_by_name():
    layers = [Layer("x", 1, 1, 0, 100), Layer("x", 1, 1, 0, 1), Layer("x", 4, 4, 0, 1), Layer("x", 1, 1, 0, 1)]
    expected = {"uniform": [2, 2], "gpipe": [2, 2], "time": [2, 2], "parameters": [1, 3]}
    for method, sizes in expected.items():
        found = partition(layers, method, 2)
        assert [stage.last - stage.first + 1 for stage in found.stages] == sizes, method
        assert found.slowest_stage_seconds == pytest.approx({"parameters": 0.012}.get(method, 0.010))
    with pytest.raises(UsageError, match=r"--method 'tim' .did you mean 'time'"):
        partition(layers, "tim", 2)
    with pytest.raises(UsageError, match="take at most 4 stages"):
        partition(layers, "time", 5)
    with pytest.raises(UsageError, match=r"cannot cut 1 layer into 2 stages; take at most 1 stage$"):
        partition(layers[:1], "time", 2)


@given(COSTS, st.data())
def test_the_slowest_stage_of_machines_that_differ(costs, data):
    paces = data.draw(st.lists(st.floats(0.1, 9), min_size=1, max_size=len(costs)))

    def slowest(bounds):
        return max(sum(costs[a:b]) * pace for (a, b), pace in zip(bounds, paces, strict=True))

    found = [(stage.first, stage.last + 1) for stage in by_slowest(costs, len(paces), paces)]
    best = min(map(slowest, cuts(len(costs), len(paces))))
    assert slowest(found) == pytest.approx(best, rel=1e-9, abs=1e-12)
