"""The commands that `minidist plan` prints for a layout: minidist accepts them, and the chosen ones run."""

import json
import random
import shlex
from dataclasses import replace

import pytest

from minidist.commands.dry_run import check_fold
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.planning.architecture import Architecture
from minidist.planning.cluster.gpus import MACHINES
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.memory import block_activations, memory_by_rank
from minidist.planning.cluster.ready_commands import compare_command, differences, dry_run_command, no_command
from minidist.planning.cluster.search import search

CLOCK = "a clock at peak hardware speeds, without the time of kernel launches"
GPT = Architecture(8, 64, 8, 256, 64, 256)
LLAMA = Architecture(8, 64, 8, 256, 64, 176, gated=True, kv_heads=4)
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "gpt, experts": Architecture(8, 64, 8, 256, 64, 256, experts=4, top_k=1),
    "llama, experts": Architecture(8, 64, 8, 256, 64, 176, gated=True, kv_heads=4, experts=4, top_k=2),
}


def settings(command):
    """The flags of a command as settings of a job."""
    words = iter(shlex.split(command)[2:])
    result = {}
    for word in words:
        alone = word in ("--sequence-parallel", "--dry-run", "--fold")
        result[word[2:].replace("-", "_")] = True if alone else next(words)
    return result


def run(command, minidist):
    """The JSON object that a command prints."""
    program, *arguments = shlex.split(command)
    assert program == "minidist"
    return json.loads(minidist(*arguments, "--json").out)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_minidist_accepts_the_commands_of_every_layout(name):
    for ranks, fixed in ((1, {}), (8, {}), (16, {}), (8, {"cp": 2}), (16, {"cp": 2, "tp": 2})):
        plans = search(Job(MODELS[name], 64, 32, "bf16", ranks), MACHINES["h100"], fixed).plans
        for plan in random.Random(ranks).sample(plans, min(5, len(plans))):
            commands = [compare_command(plan.layout, plan.job)]
            if no_command(plan.layout, plan.job) is None:
                commands.append(dry_run_command(plan.layout, plan.job, "h100"))
            for command in commands:
                given = settings(command)
                folds = given.pop("fold", False)
                gpu = given.pop("gpu", None)
                dry = given.pop("dry_run", False)
                config = TrainConfig.make(**given)
                dims = (config.dp or 1) * config.tp * config.pp * config.cp
                check_rules(config, resolve_batches(config, dims))
                # A dry run has the plan's machine, and one rank of each stage that has several.
                assert gpu == ("h100" if dry else None)
                assert folds == (dry and dims > config.pp)
                if folds:
                    check_fold(config, dims)


def test_a_dry_run_is_of_the_layout_itself():
    layout = ClusterLayout(2, 2, 2, zero=1, sequence_parallel=True, micro_batch=2, microbatches=4, recompute="full")
    job = Job(GPT, 64, 16, "bf16", 8)
    assert differences(layout, job) == [
        "recomputation of a whole stage at a time, with the scores of all its layers, instead of block by block",
        "gradients of 2 bytes instead of 4",
        CLOCK,
    ]
    given = settings(dry_run_command(layout, job, "my gpu.toml"))
    for axis in ("dp", "tp", "pp", "zero", "micro_batch", "microbatches"):
        assert int(given[axis]) == getattr(layout, axis)
    assert [int(given[key]) for key in ("layers", "width", "heads", "context")] == [8, 64, 8, 64]
    assert (given["recompute"], given["sequence_parallel"], given["dry_run"]) == ("full", True, True)
    # The states of the optimizer exist after the first step.
    assert (given["steps"], given["gpu"], given["fold"], given["dropout"]) == ("2", "my gpu.toml", True, "0.1")


def test_a_dry_run_stores_scores_where_the_plan_does():
    """minidist's attention stores scores, and fused kernels do not."""
    layout, fused = ClusterLayout(2, microbatches=4), Job(LLAMA, 64, 8, "bf16", 2)
    assert settings(dry_run_command(layout, fused, "h100"))["recompute"] == "selective"
    assert "attention recomputed, because without --recompute it stores the scores" in differences(layout, fused)
    unfused = replace(fused, fused_attention=False)
    assert "recompute" not in settings(dry_run_command(layout, unfused, "h100"))
    assert "half of the scores, because the others are masked" in differences(layout, unfused)
    ring = replace(layout, dp=1, cp=2)
    assert "recompute" not in settings(dry_run_command(ring, fused, "h100"))
    assert not any("scores" in part for part in differences(ring, fused))
    assert "18 bytes per parameter instead of 16, divided by ZeRO 3" in differences(replace(layout, zero=3), fused)
    assert "--fold" not in dry_run_command(ClusterLayout(pp=2, microbatches=8), fused, "h100")


@pytest.mark.parametrize("gated", [False, True])
def test_a_dry_run_holds_what_the_plan_counts_but_for_the_stated_differences(gated, minidist):
    """Parameters, optimizer and 2-byte gradients to the byte, with ZeRO 1 but for the padding of its units and for the
    shard of gradients that it keeps in addition; activations within 8 %, after the four values of a gated MLP's inner
    size in place of three.
    """
    model = Architecture(4, 256, 4, 256, 256, 1024 if not gated else 704, gated=gated)
    for layout in (
        ClusterLayout(2, zero=1, recompute="selective", microbatches=2),
        ClusterLayout(2, zero=1, recompute="full"),
        ClusterLayout(pp=2, microbatches=4),
        ClusterLayout(tp=2, sequence_parallel=True),
        ClusterLayout(cp=2),
    ):
        batch = layout.dp * layout.microbatches
        # Selective recomputation is that of unfused attention: that of fused kernels also drops outputs of norms.
        fused = layout.recompute != "selective"
        job = Job(model, 256, batch, "bf16", layout.ranks, fused, dropout=False, gradient_bytes=2)
        ranks = memory_by_rank(layout, job)
        # Of the plan's fullest rank; the kinds of both sides that stand for the same arrays.
        number = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
        kinds = dict(ranks[number].by_kind)
        held = run(dry_run_command(layout, job, "h100"), minidist)["step_peak_by_purpose"][
            number * layout.tp * layout.cp
        ]
        kinds["gradients"] += kinds["gradients"] // layout.dp if layout.zero else 0
        for ours, planned in (("parameter", "parameters"), ("optimizer", "optimizer"), ("gradient", "gradients")):
            padding = 0.002 * kinds[planned] if layout.zero else 0
            assert 0 <= held[ours] - kinds[planned] <= padding, (layout, ours)
        # Of one block where it is computed again, else of all that are in flight.
        blocks = 1 if layout.recompute == "full" else 4
        inner = blocks * 2 * 256 * model.inner // (layout.tp * layout.cp) if gated else 0
        planned = kinds["activations"] + kinds["logits"] + inner
        planned += kinds["workspace"] if layout.recompute == "full" else 0
        counted = held["activation"] + held.get("activation_gradient", 0)
        assert counted == pytest.approx(planned, rel=0.08), layout


@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_block_of_the_dry_run_keeps_what_the_plan_counts_and_the_stated_differences(gated, minidist):
    """Four layers more hold, to the byte, four blocks more: those of the plan, and what `differences` says of them."""
    heads, size, length = 4, 48, 128
    inner = 352 if gated else 4 * heads * size
    for layout, kv_heads in (
        (ClusterLayout(recompute="selective"), 4),
        (ClusterLayout(), 2),
        (ClusterLayout(2, zero=3, micro_batch=2, recompute="selective"), 4),
        (ClusterLayout(2, zero=1, recompute="full"), 2),
        (ClusterLayout(tp=2), 4),
        (ClusterLayout(tp=2, sequence_parallel=True, micro_batch=2, recompute="selective"), 2),
        (ClusterLayout(cp=2), 4),
        (ClusterLayout(pp=2, microbatches=4), 2),
    ):
        fused, held = layout.recompute != "selective", []
        for layers in (4, 8):
            model = Architecture(
                layers, heads * size, heads, 64, length, inner, gated=gated, kv_heads=kv_heads if gated else None
            )
            job = Job(model, length, layout.dp * layout.micro_batch * layout.microbatches, "bf16", layout.ranks, fused)
            job = replace(job, dropout=False, gradient_bytes=2)
            peak = run(dry_run_command(layout, job, "h100"), minidist)["step_peak_by_purpose"][0]
            held.append(peak["activation"] + peak.get("activation_gradient", 0))

        # With two pipeline ranks the first one has half of the layers, of two micro-batches.
        positions = length // layout.cp
        tokens = layout.micro_batch * positions
        block = block_activations(layout, job, 0)
        if layout.recompute != "full":
            block += 2 * 4 * tokens // (layout.tp if layout.sequence_parallel else 1)
            block += gated * (2 * tokens * inner // layout.tp + 2 * 2 * 4 * positions * size // 2)
            # Fused kernels keep a sum for each query and head, as ring attention does; attention that is repeated not.
            block -= 4 * tokens * heads // layout.tp if fused and layout.cp == 1 else 0
        assert held[1] - held[0] == 4 * block, (layout, kv_heads)


def test_a_block_with_experts_keeps_what_the_plan_counts_and_the_stated_differences(minidist):
    """The outputs of the experts, and of the router 2 bytes per token and expert and 4 per copy, and a few numbers."""
    layout, width, length, inner = ClusterLayout(pp=2, microbatches=4), 96, 128, 176
    for experts, top_k in ((4, 1), (8, 2)):
        held = []
        for layers in (2, 4):
            model = Architecture(layers, width, 4, 64, length, inner, gated=True, experts=experts, top_k=top_k)
            job = Job(model, length, 4, "bf16", 2, dropout=False, gradient_bytes=2)
            peak = run(dry_run_command(layout, job, "h100"), minidist)["step_peak_by_purpose"][0]
            held.append(peak["activation"] + peak["activation_gradient"])
        stated = "outputs of experts kept, and 2 bytes per token and expert of the router instead of 4"
        assert stated in differences(layout, job)
        block = block_activations(layout, job, 0)
        # What dense blocks keep, too: of norms, gates, positions, and no sums of fused attention.
        block += length * (2 * 4 + 2 * inner * top_k + 2 * 4 * width // 4 - 4 * 4)
        block += length * (2 * width * top_k + (2 - 4) * experts + 4 * top_k - 2) + 4 * experts + 2
        assert held[1] - held[0] == 2 * block, (experts, top_k)


def test_the_plan_of_a_job_file_prints_commands_that_run(tmp_path, minidist):
    path = tmp_path / "job.toml"
    path.write_text("layers = 4\nwidth = 32\nheads = 4\ncontext = 16\ntp = 2\npp = 2\nzero = 1\nglobal-batch = 8\n")
    arguments = ["plan", str(path), "--ranks", "8"]
    commands = json.loads(minidist(*arguments, "--json").out)["commands"]
    dry = run(commands["dry_run"], minidist)
    assert (dry["ranks"], dry["dry_run"]) == (8, True)
    compared = run(commands["compare"], minidist)
    assert compared["equal"]
    assert compared["ranks"] == 8
    text = minidist(*arguments).out
    assert commands["dry_run"] in text
    assert commands["compare"] in text


def test_what_minidist_cannot_run_is_said():
    experts = Job(MODELS["gpt, experts"], 64, 32, "bf16", 4)
    reason = no_command(ClusterLayout(1, 4, ep=4, microbatches=32), experts)
    assert reason == "minidist divides experts among data-parallel ranks, and dp 1 is not divisible by ep 4"
    odd = Job(Architecture(2, 100, 3, 256, 64, 256, head_size=32), 64, 32, "bf16", 1)
    assert "100 is not divisible by 3" in no_command(ClusterLayout(microbatches=32), odd)
    turned = replace(odd, model=Architecture(2, 100, 4, 256, 64, 256, gated=True, head_size=32))
    assert "100 is not divisible by 2 x 4" in no_command(ClusterLayout(microbatches=32), turned)
    assert no_command(ClusterLayout(microbatches=32), replace(turned, model=replace(turned.model, width=104))) is None
    large = Job(Architecture(2, 64, 4, 50257, 64, 300, gated=True), 64, 8, "fp8", 1)
    assert differences(ClusterLayout(microbatches=8), large) == [
        "bf16 instead of fp8",
        "the scores of one layer at a time (1.6e-05 GB), which fused kernels do not store",
        "attention recomputed, because without --recompute it stores the scores",
        "4 bytes kept per token and norm",
        "four values of the MLP's inner size kept instead of three",
        "cosines and sines of the positions kept by each block",
        "gradients of 2 bytes instead of 4",
        CLOCK,
    ]
