"""The planner against closed forms: states, activations, micro-batches in flight, rings, bubbles, and refusals."""

import random
from dataclasses import replace

import pytest

from minidist.core.base.errors import UsageError
from minidist.planning.architecture import Architecture, named
from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.gpus import MACHINES, Machine, machine_of
from minidist.planning.cluster.layout import ClusterLayout, Job, refusal, stage_layers
from minidist.planning.cluster.memory import block_activations, in_flight, memory_by_rank, rank_parameters
from minidist.planning.cluster.search import Plan, candidates, larger_gpus, reason_for, search
from minidist.planning.cluster.shared import shared
from minidist.planning.cluster.step_time import StepModel
from minidist.planning.cluster.tables import explanation
from minidist.planning.zero_stages import layout_stages

GPT = Architecture(8, 512, 8, 1024, 256, 2048)
A100 = MACHINES["a100-80gb"]


def job(layout, model=GPT, length=256, **more):
    """Return the job that a layout's batch belongs to."""
    return Job(model, length, layout.dp * layout.micro_batch * layout.microbatches, "fp16", layout.ranks, **more)


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_of_a_layout_hold_every_parameter(pp, tp):
    layout = ClusterLayout(tp=tp, pp=pp)
    ranks = [rank_parameters(layout, job(layout), r, layers) for r, layers in enumerate(stage_layers(layout, 8))]
    copied = GPT.vocabulary * GPT.width if pp > 1 else 0  # the embedding is tied, and lies on both ends
    assert sum(rank.split for rank in ranks) * tp + sum(rank.replicated for rank in ranks) == GPT.parameters + copied


@pytest.mark.parametrize(("zero", "per_parameter"), [(0, 18), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 16 / 4)])
def test_states_per_parameter(zero, per_parameter):
    layout = ClusterLayout(dp=4, zero=zero)
    states = memory_by_rank(layout, job(layout))[0].states
    assert states == pytest.approx(per_parameter * GPT.parameters, abs=64)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_those_of_korthikanti_et_al(t, sequence_parallel, recompute):
    s, b, h, a = 256, 3, GPT.width, GPT.heads
    layout = ClusterLayout(tp=t, sequence_parallel=sequence_parallel and t > 1, micro_batch=b, recompute=recompute)
    outer = t if layout.sequence_parallel else 1
    if recompute == "full":
        expected = 2 * s * b * h / outer
    else:
        expected = s * b * h * (10 / outer + 24 / t + (5 * a * s / (h * t) if recompute == "none" else 0))
    assert block_activations(layout, job(layout, fused_attention=False, dropout=True), 0) == expected


def test_micro_batches_in_flight():
    # 1F1B keeps p - r; interleaved 2 (p - r - 1) + (v - 1) p + 1 chunks of 1 / v of the layers.
    assert [in_flight(ClusterLayout(pp=4, microbatches=8), r) for r in range(4)] == [4, 3, 2, 1]
    assert [in_flight(ClusterLayout(pp=4, microbatches=2), r) for r in range(4)] == [2, 2, 2, 1]
    assert in_flight(ClusterLayout(pp=4, vp=2, microbatches=8), 0) == (2 * 3 + 4 + 1) / 2
    # The first rank then holds L (1 + (p - 1) / (p v)) layers.
    assert in_flight(ClusterLayout(pp=8, vp=3, microbatches=64), 0) * 12 == pytest.approx(96 * (1 + 7 / 24))


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (3, 1), (4, 2), (8, 1), (2, 4)])
def test_every_layer_lies_on_one_stage(pp, vp):
    stages = stage_layers(ClusterLayout(pp=pp, vp=vp), 8)
    assert sorted(layer for stage in stages for layer in stage) == list(range(8))
    assert len(stages) == pp


def test_a_ring_costs_what_it_sends():
    step = StepModel(ClusterLayout(dp=8), job(ClusterLayout(dp=8)), A100)
    bandwidth = A100.link * CALIBRATION.link_efficiency
    wait = 7 * CALIBRATION.message_seconds
    assert step.ring_seconds(1e9, 8, 1) == pytest.approx(7 / 8 * 1e9 / bandwidth + wait)
    assert step.ring_seconds(1e9, 8, 1, passes=2) == pytest.approx(2 * (7 / 8 * 1e9 / bandwidth + wait))
    assert step.ring_seconds(1e9, 1, 1) == 0
    # Ranks that are eight apart lie on different nodes, and each has one network adapter.
    assert step.ring_seconds(1e9, 8, 8) > 5 * step.ring_seconds(1e9, 8, 1)


EXPERTS = Architecture(8, 512, 8, 1000, 1024, 1024, gated=True, experts=16, top_k=2, expert_inner=256, dense_layers=2)


def test_an_exchange_leaves_a_node_through_one_adapter_per_gpu():
    machine, c = MACHINES["h100"], CALIBRATION
    step = StepModel(ClusterLayout(dp=16, ep=16), job(ClusterLayout(dp=16, ep=16), EXPERTS), machine)
    inside = 7 / 8 * 1e9 / (machine.link * c.link_efficiency)
    # Of a token's two experts both lie in its own node with 1/4, so it goes to the other node with 3/4, once.
    across = 0.75 / 2 * 1e9 / (machine.network * c.network_efficiency)
    assert step.exchange_seconds(1e9) == pytest.approx(across + c.message_seconds)
    near = StepModel(ClusterLayout(dp=8, ep=8), job(ClusterLayout(dp=8, ep=8), EXPERTS), machine)
    assert near.exchange_seconds(1e9) == pytest.approx(inside + c.message_seconds)
    assert across > 4 * inside


@pytest.mark.parametrize(("ep", "possible"), [(32, 4), (64, 4), (128, 8)])
def test_a_token_reaches_the_nodes_of_its_groups_of_experts_alone(ep, possible):
    """DeepSeek-V3: 256 experts in 8 groups. A token chooses 4 groups; without groups it may reach every node."""
    deep = replace(EXPERTS, experts=256, top_k=8, expert_groups=(8, 4))
    layout, machine, c = ClusterLayout(dp=ep, ep=ep), MACHINES["h100"], CALIBRATION
    reached = 0.0
    for model, nodes in ((deep, possible), (replace(deep, expert_groups=(1, 1)), ep // 8)):
        seconds = StepModel(layout, job(layout, model), machine).exchange_seconds(8e9) - c.message_seconds
        copies = seconds * machine.network * c.network_efficiency / 1e9
        # Of all choices of eight nodes the mean number of different ones, without the token's own.
        expected = (1 - 8 / ep) * nodes * (1 - (1 - 1 / nodes) ** 8)
        assert copies == pytest.approx(expected)
        assert copies >= reached
        reached = copies


def test_each_micro_batch_adds_to_the_gradients_of_all_experts_of_a_rank():
    """They are read and written, in 4 bytes or 2, for however few tokens; experts on other ranks are not."""
    wide = replace(EXPERTS, width=4096, heads=32, expert_inner=8192)
    bandwidth = A100.memory_bandwidth * CALIBRATION.memory_efficiency
    for ep in (1, 2):
        layout = ClusterLayout(dp=2, ep=ep, micro_batch=64)
        four, two = (
            StepModel(layout, replace(job(layout, wide), gradient_bytes=size), A100).layer_pass(2).backward
            for size in (4, 2)
        )
        own = wide.block_at(2).expert / ep
        assert four - two == pytest.approx(2 * 2 * own / bandwidth)


def test_a_layer_with_experts_moves_the_copies_of_its_tokens():
    layout = ClusterLayout(micro_batch=64)
    wide = replace(EXPERTS, width=4096, heads=32, expert_inner=1024)
    with_copies = StepModel(layout, job(layout, wide), A100)
    counted = replace(CALIBRATION, permutation_passes=0.0)
    without = StepModel(layout, job(layout, wide), A100, counted)
    moved = 2 * 8 * 64 * 256 * 2 * 4096 / (A100.memory_bandwidth * CALIBRATION.memory_efficiency)
    assert with_copies.layer_pass(2).forward - without.layer_pass(2).forward == pytest.approx(moved)
    assert with_copies.layer_pass(0) == without.layer_pass(0)


def test_the_slowest_rank_may_be_in_the_middle_of_the_pipeline():
    # The first rank's two layers have no experts; the last rank has one layer, and its projection is small.
    layout = ClusterLayout(pp=4, microbatches=800)
    wide = replace(EXPERTS, layers=7, vocabulary=8, width=4096, heads=32, inner=4096, expert_inner=8192)
    step = StepModel(layout, job(layout, wide), A100)
    stages = stage_layers(layout, wide.layers)
    seconds = [step.stage_pass(rank, layers).seconds for rank, layers in enumerate(stages)]
    assert seconds[1] > max(seconds[0], seconds[3])
    middle = step.stage_pass(1, stages[1])
    assert step.step().compute >= 800 * (middle.forward + middle.backward)


def test_the_step_of_a_model_with_experts_has_a_wider_range():
    layout = ClusterLayout()
    plans = [Plan(layout, job(layout, model), A100) for model in (GPT, EXPERTS)]
    assert [plan.time_range for plan in plans] == [CALIBRATION.time_range, CALIBRATION.sparse_time_range]
    printed = plans[1].as_dict()["time"]
    assert printed["high_seconds"] / printed["step_seconds"] == pytest.approx(CALIBRATION.sparse_time_range[1])


def test_the_bubble_is_the_share_of_narayanan_et_al():
    for pp, vp, m in ((4, 1, 8), (4, 2, 8), (2, 4, 64)):
        layout = ClusterLayout(pp=pp, vp=vp, microbatches=m)
        idle = (pp - 1) / vp
        # Of the pipeline; the whole step also has the optimizer and a constant.
        assert Plan(layout, job(layout), A100).time.bubble < idle / (m + idle)
        large = replace(GPT, width=8192, heads=64, inner=32768)
        layout = replace(layout, micro_batch=64)
        assert Plan(layout, job(layout, large), A100).time.bubble == pytest.approx(idle / (m + idle), rel=0.2)


def test_the_parts_of_a_step_are_its_seconds():
    layout = ClusterLayout(2, 2, 2, zero=1, microbatches=4)
    time = Plan(layout, job(layout), A100).time
    parts = time.compute + sum(time.exposed.values()) + time.bubble * time.seconds
    assert parts == pytest.approx(time.seconds)
    assert set(time.exposed) == {"tp", "pp", "dp"}


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (ClusterLayout(dp=3), "is 3 ranks, and the job has 8 GPUs"),
        (ClusterLayout(dp=8, micro_batch=3), "is 24 sequences, and the global batch has 16"),
        (ClusterLayout(tp=8, pp=1, microbatches=16), "4 heads are not divisible by tp 8"),
        (ClusterLayout(pp=8, vp=2, microbatches=16), "more than the model's 8 layers"),
        (ClusterLayout(dp=8, vp=2, microbatches=2), "needs a pipeline"),
        (ClusterLayout(dp=2, pp=4, vp=2, micro_batch=4, microbatches=2), r"micro-batches \(2\) divisible by pp 4"),
        (ClusterLayout(dp=8, sequence_parallel=True, microbatches=2), "needs tp above 1"),
        (ClusterLayout(dp=8, ep=2, microbatches=2), "needs a model with experts"),
    ],
)
def test_impossible_layouts_have_a_reason(layout, sentence):
    model = replace(GPT, heads=4, head_size=128) if layout.tp == 8 else GPT
    reason = refusal(layout, Job(model, 256, 16, "bf16", 8))
    assert reason is not None
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(reason)


def test_an_expert_is_divided_over_tp_unless_ep_needs_the_ranks():
    """As the MLP of other layers, an expert has the same number of elements on each rank."""
    model = replace(GPT, experts=8, top_k=2, expert_inner=769)
    job = Job(model, 256, 16, "bf16", 8)
    divided = refusal(ClusterLayout(tp=8, microbatches=16), job)
    assert divided == "an expert's width of 769 is not divisible by tp 8"
    assert refusal(ClusterLayout(tp=8, ep=8, microbatches=16), job) is None
    assert refusal(ClusterLayout(tp=8, microbatches=16), replace(job, model=replace(model, expert_inner=768))) is None


def test_a_search_ranks_what_fits():
    found = search(Job(named("llama-3.1-8b"), 4096, 64, "bf16", 16, kernels="fused"), MACHINES["h100"], {})
    assert found.plans
    assert all(plan.fit.fits for plan in found.plans)
    assert found.plans[0].time.seconds <= 1.1 * min(plan.time.seconds for plan in found.plans)
    assert {plan.layout.ranks for plan in found.plans} == {16}
    # What does not fit says by how much, and what is impossible why; no layout is counted twice.
    assert found.too_large
    assert found.impossible
    assert not any(plan.fit.fits for plan in found.too_large)
    tried = [plan.layout for plan in found.plans + found.too_large] + [layout for layout, _ in found.impossible]
    assert len(set(tried)) == len(tried)
    one = found.too_large[0]
    needed = max(rank.peak for rank in one.memory) + CALIBRATION.reserved_bytes
    assert needed == min(plan.fit.central for plan in found.too_large)  # those that need least come first
    low, high = one.fit.low, one.fit.high
    assert low < needed < high
    assert one.shortage.endswith(f" needs {low / 1e9:,.0f} to {high / 1e9:,.0f} GB, and h100 has 85 GB (79 GiB)")
    assert reason_for(found.plans[0], found.plans)
    # What is fixed stays, and the layouts with it are those of the whole search.
    fixed = search(
        Job(named("llama-3.1-8b"), 4096, 64, "bf16", 16, kernels="fused"), MACHINES["h100"], {"tp": 4, "zero": 1}
    )
    wanted = [plan.layout for plan in found.plans if (plan.layout.tp, plan.layout.zero) == (4, 1)]
    assert [plan.layout for plan in fixed.plans if plan.layout.dp > 1] == [one for one in wanted if one.dp > 1]


def test_the_reason_says_what_is_compared():
    found = search(Job(named("llama-3.1-8b"), 8192, 256, "bf16", 64, kernels="fused"), MACHINES["h100"], {})
    assert found.plans[0].layout.zero == 2
    # Without ZeRO is with stage 0, and not with stage 1.
    ratio = next(plan.time.seconds for plan in found.plans if plan.layout.zero == 0) / found.plans[0].time.seconds
    assert reason_for(found.plans[0], found.plans) == f"without ZeRO the best takes {ratio:.2f} times as long"
    # Ratios below 1.005 are no reason; when there is no other, what decided is said.
    tied = next(plan for plan in found.plans if plan.layout.recompute == "selective" and plan.layout.zero)
    same = Plan(replace(tied.layout, zero=0, recompute="none"), tied.job, tied.machine)
    same.__dict__["time"] = tied.time
    assert reason_for(tied, [tied, same]).startswith(
        "the best layout without ZeRO or without recomputation is equally fast; layouts are sorted by step"
        " time multiplied by 1.01 per kind of parallelism"
    )


def test_small_models_are_data_parallel_and_large_ones_stay_in_a_node():
    small = search(Job(named("gpt2"), 1024, 512, "bf16", 8), A100, {}).plans[0].layout
    assert (small.dp, small.tp, small.pp) == (8, 1, 1)
    large = search(Job(named("gpt3-175b"), 2048, 1536, "bf16", 512), A100, {}).plans[0].layout
    assert 1 < large.tp <= 8
    assert large.pp > 1


def test_a_layout_of_four_axes_in_memory():
    gpt2, one, four = named("gpt2"), ClusterLayout(4, micro_batch=2), ClusterLayout(4, 2, 2, micro_batch=2)
    peaks = [
        {stage: rank.by_kind for stage, rank in layout_stages(job(layout, gpt2, 512), layout).items()}
        for layout in (one, four)
    ]
    assert set(peaks[0]) == set(peaks[1])
    assert peaks[1]["stage0"]["optimizer"] < 0.6 * peaks[0]["stage0"]["optimizer"]
    with pytest.raises(UsageError, match="12 heads are not divisible by tp 5"):
        layout_stages(job(ClusterLayout(tp=5), gpt2, 512), ClusterLayout(tp=5))


def test_a_machine_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    keys = "fp16 = 1e12\nmemory = 1e10\nmemory_bandwidth = 1e11\nlink = 1e10\nnetwork = 1e9\n"
    path.write_text(keys + "gpus_per_node = 4\n")
    assert machine_of(str(path)) == Machine("mine", 1e12, 0.0, 1e10, 1e11, 1e10, 1e9, 4)
    assert machine_of(str(path)).host_memory == 125e9
    path.write_text(keys + "host_memory = 64e9\n")
    assert machine_of(str(path)) == Machine("mine", 1e12, 0.0, 1e10, 1e11, 1e10, 1e9, host_memory=64e9)
    for text, sentence in (
        (keys + "colour = 3\n", "key 'colour'"),
        (keys.replace("link = 1e10\n", ""), "has no key 'link'"),
        (
            keys.replace("1e12", "-1.0"),
            r"fp16 in '.*mine.toml'.* is -1.0; it must be a number from 1e\+09 to 1e\+21 FLOP",
        ),
        (keys.replace("1e12", "1e-300"), "is 1e-300; it must be a number"),
        (keys.replace("1e12", "nan"), "is nan; it must be a number"),
        (keys.replace("1e12", "true"), "is True; it must be a number"),
        (keys.replace("memory = 1e10", "memory = 1"), r"is 1; it must be a number from 1e\+09 to 1e\+18 bytes"),
        (keys.replace("network = 1e9", "network = 1e-9"), r"network in .* is 1e-09; it must be a number from 10000 to"),
        (keys + "fp8 = 1e-3\n", r"is 0.001; it must be 0, or a number from 1e\+09"),
        (keys + "gpus_per_node = 0\n", r"gpus_per_node in .* is 0; it must be a whole number from 1 to 100000 GPUs"),
        (keys + "host_memory = 0\n", r"host_memory in .* is 0; it must be a number from 1e\+06 to 1e\+18 bytes"),
        (keys + "gpus_per_node = 8.0\n", r"is 8.0; it must be a whole number"),
        (keys + "family = 'tpu'\n", "family 'tpu'"),
        (keys.replace("1e12", "'fast'"), r"fp16 in .*mine.toml'.* is 'fast'; it must be a number from"),
        (keys + "name = 3\n", r"name 3 in .*mine.toml'.* is not a string; write it in quotes"),
        ("[gpu]\n" + keys, "key 'gpu'"),
        ("fp16 = \n", "is not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=sentence):
            machine_of(str(path))
    with pytest.raises(UsageError, match="--gpu 'H1000' is unknown \\(did you mean 'h100'\\?\\); it must be"):
        machine_of("H1000")
    assert machine_of("H100") is MACHINES["h100"]
    with pytest.raises(UsageError, match="has no 8-bit floats"):
        A100.peak("fp8")


def test_gpus_are_named_as_people_and_drivers_name_them():
    for written, name in (
        ("H100 SXM 80GB", "h100"),
        ("H100 80 GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100_pcie", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("a100 80g", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("L40S", "l40s"),
        ("h20", "h20"),
        ("H200 141GB", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("B200 180GB", "b200"),
    ):
        assert machine_of(written).name == name, written
    for written, sentence in (
        ("A100", "--gpu 'A100' may be several GPUs; give a100-40gb or a100-80gb"),
        ("H100 40GB", "--gpu 'H100 40GB' is unknown .did you mean 'h100'"),
        ("tpu-v5p", "or a .json or .toml file with the keys name, fp16, fp8, memory"),
        ("", "--gpu '' is unknown"),
        ("GPU", "--gpu 'GPU' is unknown"),
    ):
        with pytest.raises(UsageError, match=sentence):
            machine_of(written)


def test_a_gpu_that_is_recommended_is_no_slower():
    """An h20 has more memory than an h100, and computes a sixth as fast."""
    names = [gpu.name for gpu in larger_gpus(Job(named("gpt2"), 1024, 8), MACHINES["h100"])]
    assert names[:2] == ["h100-96gb", "h200"]
    assert not {"h20", "h100-nvl"} & set(names)


@pytest.mark.parametrize(("zero", "per_parameter"), [(0, 16), (1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 14 / 4)])
def test_gradients_may_be_summed_in_two_bytes(zero, per_parameter):
    layout = ClusterLayout(dp=4, zero=zero)
    states = memory_by_rank(layout, job(layout, gradient_bytes=2))[0].states
    assert states == pytest.approx(per_parameter * GPT.parameters, abs=64)


@pytest.mark.parametrize("model", [GPT, replace(GPT, gated=True)])
def test_with_fp8_the_inputs_of_products_are_kept_in_one_byte(model):
    """Of two norms' outputs (512 each) and the activation's output (4 x 512) one byte less per element.

    The attention's output is kept twice: in two bytes for its own backward, in one for the projection's.
    """
    layout = ClusterLayout()
    bf16, fp8 = (
        block_activations(layout, replace(job(layout, model, dropout=False), precision=precision), 0)
        for precision in ("bf16", "fp8")
    )
    assert bf16 - fp8 == 256 * (2 * 512 + model.inner - 512)


def test_an_expert_may_be_divided_over_fewer_ranks_than_tp():
    model = replace(named("mixtral-8x7b"), layers=2)
    own = {}
    for etp in (None, 1, 2, 4):
        layout = ClusterLayout(dp=2, tp=4, ep=2, etp=etp)
        assert refusal(layout, job(layout, model, 8192)) is None
        own[etp] = rank_parameters(layout, job(layout, model), 0, [0, 1])
        assert own[etp].expert == 2 * 8 * 3 * 4096 * 14336 // (2 * (etp or 4))
        assert layout.as_dict()["etp"] == (etp or 4)
    assert own[1].split == own[4].split
    # With etp 1 the eight ranks have each expert four times: ZeRO divides its states over four.
    layout = ClusterLayout(dp=2, tp=4, ep=2, etp=1, zero=1)
    states = memory_by_rank(layout, job(layout, model))[0].by_kind
    assert states["optimizer"] == 12 * (own[1].expert // 4 + -(-(own[1].split + own[1].replicated) // 2))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (ClusterLayout(tp=4, etp=3), "etp 3 does not divide tp 4"),
        (ClusterLayout(dp=2, tp=4, ep=8, etp=4), "ep 8 x etp 4 does not divide dp 2 x cp 1 x tp 4"),
    ],
)
def test_an_impossible_etp_has_a_reason(layout, sentence):
    assert refusal(layout, job(layout, named("mixtral-8x7b"), 8192)) == sentence


def test_all_ranks_wait_for_the_busiest_expert():
    model = replace(named("mixtral-8x7b"), layers=2)
    layout = ClusterLayout(dp=4, ep=4, micro_batch=2)
    balanced, unequal = (
        StepModel(layout, job(layout, model, 4096, expert_imbalance=busiest), machine_of("h100"))
        for busiest in (1.0, 1.5)
    )
    # Half of the experts' products more, and no more of attention's: 2 tokens x 3 matrices per token and expert.
    more = unequal.layer_pass(0).forward - balanced.layer_pass(0).forward
    tokens = 2 * 4096
    c = CALIBRATION
    products = balanced.products_seconds(0.5 * tokens * 2 * 2 * 3 * 4096 * 14336) / c.expert_efficiency
    # Half of what eager kernels move for an inner element, 4 bytes, because the kernels are unknown.
    moved = 2 * tokens * 0.5 * ((c.block_passes / 2 + 4 / 2) * 14336 + 2 * c.permutation_passes * 4096)
    others = moved / (machine_of("h100").memory_bandwidth * CALIBRATION.memory_efficiency)
    assert more == pytest.approx(products + others)
    exchanges = [one.layer_pass(0).messages["ep"] for one in (balanced, unequal)]
    assert exchanges[0] < exchanges[1] < 1.5 * exchanges[0]  # the latency is paid once
    kept = [block_activations(layout, job(layout, model, 4096, expert_imbalance=busiest), 0) for busiest in (1.0, 1.5)]
    assert kept[1] - kept[0] == tokens * (2 * 4096 + 6 * 14336)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_what_layouts_share_is_what_each_has_alone(model):
    """A search computes shared parts once; a separate job for each layout shares nothing with the others."""
    of_all = Job(replace(named(model), layers=7), 4096, 64, "bf16", 16)
    found = search(of_all, MACHINES["h100"], {})
    for plan in random.Random(0).sample(found.plans + found.too_large, 300):
        other = Plan(ClusterLayout(), Job(GPT, 256, 1, gpus=1), A100)
        # Another job drops what was kept.
        assert other.time != plan.time
        assert other.fullest != plan.fullest
        alone = Plan(plan.layout, of_all, MACHINES["h100"])
        assert (alone.time, alone.memory, alone.fullest) == (plan.time, plan.memory, plan.fullest)
        assert plan.fullest == max(plan.memory, key=lambda rank: rank.likely(of_all))
        assert plan.fullest_rank == plan.memory.index(plan.fullest)


def test_what_is_shared_is_computed_once_for_one_job_and_anew_for_another():
    computed = []

    @shared(lambda job, layer: (job,), lambda job, layer: layer)
    def sum_of(job, layer):
        computed.append((job, layer))
        return 10 * job + layer

    calls = [(1, 2), (1, 2), (1, 3), (1, 2), (2, 2), (2, 3), (1, 2)]
    assert [sum_of(*call) for call in calls] == [12, 12, 13, 12, 22, 23, 12]
    assert computed == [(1, 2), (1, 3), (2, 2), (2, 3), (1, 2)]


def test_layouts_with_other_expert_ranks_share_nothing_that_depends_on_them():
    job_of_all = Job(replace(named("mixtral-8x7b"), layers=2), 4096, 8, "bf16", 16)
    seconds = []
    for etp in (4, 1, 4):
        layout = ClusterLayout(dp=4, tp=4, ep=4, etp=etp, microbatches=2)
        seconds.append(StepModel(layout, job_of_all, MACHINES["h100"]).stage_pass(0, [0, 1]).seconds)
    assert seconds[0] == seconds[2] != seconds[1]


def test_where_every_rank_has_all_experts_none_is_busier():
    model = replace(named("mixtral-8x7b"), layers=2)
    for ep, busiest in ((1, 1.0), (2, 2.0), (8, 3.0)):
        layout = ClusterLayout(dp=8, ep=ep)
        unequal = Plan(layout, job(layout, model, 4096, expert_imbalance=3.0), machine_of("h100"))
        same = Plan(layout, job(layout, model, 4096, expert_imbalance=busiest), machine_of("h100"))
        assert (unequal.time, unequal.memory) == (same.time, same.memory)
        balanced = Plan(layout, job(layout, model, 4096), machine_of("h100"))
        assert (unequal.time == balanced.time) == (ep == 1)


def test_the_explanation_of_exchanges_counts_the_busiest_rank():
    model = named("mixtral-8x7b")
    layout = ClusterLayout(dp=32, pp=4, ep=8, microbatches=16)
    plan = Plan(layout, job(layout, model, 4096, expert_imbalance=2.0), machine_of("h100"))
    line = next(line for line in explanation(plan) if line.startswith("ep messages"))
    assert line.startswith("ep messages = 16 micro-batches x 8 layers x 4 exchanges x ")


def test_ranks_that_share_an_expert_gather_its_tokens():
    """With sequence parallelism a rank has a tp-th of the tokens, and an expert on etp ranks those of all of them."""
    model, kept = replace(named("mixtral-8x7b"), layers=2), {}
    for etp in (1, 2, 4):
        layout = ClusterLayout(dp=2, tp=4, ep=2, etp=etp, sequence_parallel=True)
        kept[etp] = block_activations(layout, job(layout, model, 4096), 0)
    inputs = 2 * 4096 * 4096 * 2  # 2 bytes x tokens x width x experts per token
    assert kept[4] - kept[1] == 3 * (kept[2] - kept[1]) == inputs * 3 // 4


def test_a_search_with_etp_takes_degrees_that_it_divides():
    of_all = Job(replace(named("mixtral-8x7b"), layers=2), 4096, 64, "bf16", 16)
    found = search(of_all, MACHINES["h200"], {"etp": 4})
    assert {plan.layout.tp for plan in found.plans} == {4, 8}
    with pytest.raises(UsageError, match="no layout of 16 GPUs has etp 3; change one of them"):
        search(of_all, MACHINES["h200"], {"etp": 3})


@pytest.mark.parametrize(("gpus_per_node", "most"), [(1, 1), (2, 2), (4, 4), (8, 8), (72, 8)])
def test_a_search_keeps_tensor_parallel_ranks_inside_a_node(gpus_per_node, most):
    of_all = Job(GPT, 256, 16, "bf16", 16)
    tried = {layout.tp for layout in candidates(of_all, replace(A100, gpus_per_node=gpus_per_node), {})}
    assert tried == {tp for tp in (1, 2, 4, 8) if tp <= most}


@pytest.mark.parametrize(
    ("pp", "vp", "layers", "stages"),
    [
        (2, 2, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (2, 2, 7, [[0, 1, 4, 5], [2, 3, 6]]),
        (3, 1, 8, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (2, 3, 7, [[0, 1, 3, 5], [2, 4, 6]]),
    ],
)
def test_a_rank_has_every_pp_th_chunk_and_the_first_chunks_are_the_larger_ones(pp, vp, layers, stages):
    assert stage_layers(ClusterLayout(pp=pp, vp=vp), layers) == stages


def test_a_plan_fits_when_the_most_that_it_may_need_is_there():
    layout = ClusterLayout(dp=8)
    fused = replace(job(layout), kernels="fused")
    peak = Plan(layout, fused, A100).fullest.peak
    reserved = CALIBRATION.reserved_bytes
    central, most = peak + reserved, CALIBRATION.memory_range[1] * peak + reserved
    for memory, verdict in ((most, "yes"), (most - 1, "may not"), (central, "may not"), (central - 1, "no")):
        plan = Plan(layout, fused, replace(A100, memory=memory))
        assert (plan.fit.verdict, plan.fit.fits, plan.fit.margin) == (verdict, verdict != "no", memory - central)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("fused_attention", [False, True])
def test_the_operations_of_the_hardware_are_those_of_korthikanti_et_al(recompute, fused_attention):
    """Per token and layer 24 h^2 + 4 s h forward, for a vocabulary of v 2 h v; a backward pass is two forward passes.

    With full recomputation every layer runs forward once more, and the projection to the vocabulary does not. Selective
    recomputation runs the attention's core once more: 4 s h forward, counted with its backward as 12 s h.
    """
    layout = ClusterLayout(dp=2, micro_batch=3, recompute=recompute)
    s, h, tokens = 256, GPT.width, 6 * 256
    layers = 8 * (24 * h**2 + 4 * s * h)
    whole = 3 * (layers + 2 * h * GPT.vocabulary)
    again = {"none": 0, "selective": 0 if fused_attention else 8 * 12 * s * h, "full": layers}[recompute]
    plan = Plan(layout, job(layout, fused_attention=fused_attention), A100)
    assert (plan.model_flops, plan.hardware_flops) == (tokens * whole, tokens * (whole + again))


@pytest.mark.parametrize(("zero", "passes"), [(0, 2), (1, 2), (2, 4 + 1)])
def test_zero_2_reduces_the_gradients_of_every_micro_batch(zero, passes):
    """8 ranks of a node, 4 micro-batches: `passes` rings of 2 bytes per parameter, a share of them exposed."""
    layout = ClusterLayout(dp=8, zero=zero, microbatches=4)
    step = StepModel(layout, job(layout), A100)
    c = CALIBRATION
    ring = 7 / 8 * 2 * GPT.parameters / (c.link_efficiency * A100.link) + 7 * c.message_seconds
    assert step.step().exposed == {"dp": pytest.approx(c.gradients_exposed * passes * ring)}


@pytest.mark.parametrize("vp", [1, 2, 4])
def test_each_chunk_sends_an_activation_and_gets_a_gradient(vp):
    """Four stages with one tensor-parallel rank each lie in one node, and those of four or eight ranks on several ones,
    where some stages send over the network, for which all others wait.
    """
    c = CALIBRATION
    network = c.network_efficiency * A100.network
    for tp, bandwidth in ((1, c.link_efficiency * A100.link), (4, network), (8, network)):
        layout = ClusterLayout(pp=4, tp=tp, vp=vp, micro_batch=3, microbatches=4)
        model = replace(GPT, layers=16)
        messages = StepModel(layout, job(layout, model), A100).stage_pass(1, stage_layers(layout, 16)[1]).messages
        nbytes = 2 * 3 * 256 * GPT.width / tp
        assert messages["pp"] == pytest.approx(2 * vp * (nbytes / bandwidth + c.handoff_seconds))


def test_every_machine_is_planned_in_every_precision_that_it_has():
    for machine in MACHINES.values():
        for precision in ("bf16", "fp8") if machine.fp8 else ("bf16",):
            of = replace(job(ClusterLayout()), precision=precision)
            assert Plan(ClusterLayout(), of, machine).time.seconds > 0, (machine.name, precision)


def test_fp8_has_a_peak_of_its_own():
    h100 = MACHINES["h100"]
    assert [h100.peak(precision) for precision in ("fp16", "bf16", "fp8")] == [989.4e12, 989.4e12, 1978.9e12]
    layout = ClusterLayout()
    seconds = [
        StepModel(layout, replace(job(layout), precision=precision), h100).products_seconds(1e15)
        for precision in ("bf16", "fp8")
    ]
    assert seconds == [
        pytest.approx(1e15 / (efficiency["h100"] * peak))
        for efficiency, peak in ((CALIBRATION.product_efficiency, 989.4e12), (CALIBRATION.fp8_efficiency, 1978.9e12))
    ]


@pytest.mark.parametrize(("length", "cp", "possible"), [(256, 2, True), (258, 2, False), (12, 3, True), (9, 3, False)])
def test_a_sequence_is_cut_into_two_chunks_for_each_context_parallel_rank(length, cp, possible):
    layout = ClusterLayout(cp=cp)
    sentence = f"a sequence of {length} is not divisible into 2 x cp {cp} chunks"
    assert refusal(layout, job(layout, length=length)) == (None if possible else sentence)
    assert refusal(ClusterLayout(), job(ClusterLayout(), length=9)) is None


def test_zero_3_has_one_chunk_of_layers_per_rank():
    layout = ClusterLayout(dp=2, pp=2, vp=2, zero=3, microbatches=2)
    assert refusal(layout, job(layout)) == "ZeRO 3 would gather the layers of each of vp 2 chunks for each micro-batch"
    for possible in (replace(layout, vp=1), replace(layout, zero=2)):
        assert refusal(possible, job(possible)) is None


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_eager_kernels_of_a_gated_block_keep_more_and_those_of_gpt_do_not(recompute):
    """Two float32 inputs of norms and their normalized values, 8 bytes per element, and silu(gate) in 2 bytes."""
    layout = ClusterLayout(2, 2, 2, sequence_parallel=True, micro_batch=3, microbatches=2, recompute=recompute)
    tokens = 3 * 256
    for model, block in ((replace(GPT, gated=True), tokens * (8 * 512 + 2 * 2048) // 2), (GPT, 0)):
        ranks = memory_by_rank(layout, job(layout, model))
        # Of four layers on each of two ranks; the first rank has two micro-batches in flight. And the loss.
        kept = (8 * block, 4 * block) if recompute == "none" else (block, block)
        loss = tokens * model.vocabulary * 6 // 2
        assert tuple(rank.eager for rank in ranks) == (kept[0], kept[1] + loss)
    experts = memory_by_rank(ClusterLayout(ep=1), job(ClusterLayout(), replace(EXPERTS, layers=3)))[0]
    assert experts.eager == 256 * (3 * 8 * 512 + 2 * 2 * 1024 + 2 * 2 * 256 + 6 * EXPERTS.vocabulary)


def test_a_program_that_gathers_logits_has_all_of_them_on_each_tensor_parallel_rank():
    """16 bytes per logit, which --tp does not divide; gradients of 2 bytes, and a float32 copy of the shard's."""
    layout = ClusterLayout(4, 2, zero=1)
    megatron, scaling = (
        replace(job(layout, replace(GPT, gated=True)), framework=name) for name in ("megatron", "scaling")
    )
    assert (megatron.state_bytes(1), scaling.state_bytes(1)) == ((2, 4, 12), (2, 2, 16))
    assert replace(scaling, accounting="zero").state_bytes(1) == (2, 2, 12)
    rank, (eager,) = memory_by_rank(layout, scaling)[0], memory_by_rank(layout, replace(scaling, framework="pytorch"))
    logits = 256 * GPT.vocabulary
    assert rank.by_kind["logits"] == eager.by_kind["logits"] == 6 * logits // 2
    assert rank.eager - eager.eager == (16 - 12 // 2) * logits
    # Fused norms keep no float32 values: what is left is silu(gate) and the loss.
    fused_norms = memory_by_rank(layout, replace(scaling, kernels="fused-norms"))[0]
    assert rank.eager - fused_norms.eager == GPT.layers * 256 * 8 * GPT.width


def test_what_a_job_says_of_its_kernels_decides_the_range():
    """Unknown kernels are a range with its middle; fp8 comes with fused ones."""
    model = replace(named("llama-3.1-8b"), positions=8192)
    layout = ClusterLayout(8, zero=2)
    fits = {
        (kernels, precision): Plan(
            layout, replace(job(layout, model, 8192), kernels=kernels, precision=precision), MACHINES["h100"]
        )
        for kernels, precision in (("any", "bf16"), ("fused", "bf16"), ("eager", "bf16"), ("any", "fp8"))
    }
    low, high = CALIBRATION.memory_range
    reserved = CALIBRATION.reserved_bytes
    for (kernels, precision), plan in fits.items():
        least, likely, most = {"any": (0, 0.5, 1), "fused": (0, 0, 0), "eager": (1, 1, 1)}[
            "fused" if precision == "fp8" else kernels
        ]
        peak, eager = plan.fullest.peak, plan.fullest.eager
        assert plan.fit.low == pytest.approx(low * (peak + least * eager) + reserved)
        assert plan.fit.central == pytest.approx(peak + likely * eager + reserved)
        # Of eager kernels PyTorch's allocator holds 15 % in fragments.
        held = 1 / 0.85 if least else 1
        assert plan.fit.high == pytest.approx(
            max(high * (peak + most * eager) + reserved, held * plan.fit.central if least else 0)
        )
        assert plan.fit.margin == pytest.approx(MACHINES["h100"].memory - held * plan.fit.central)
        assert plan.fit.fits == (plan.fit.margin >= 0)
    verdicts = [plan.fit.verdict for plan in fits.values()]
    assert verdicts[:3] == ["no", "yes", "no"]
