"""The commands that `minidist plan` prints for a layout: minidist accepts them, and the chosen ones run."""

import json
import random
import shlex

import pytest

from minidist.cli import main
from minidist.config.rules import check_rules
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.planning.architecture import Architecture
from minidist.planning.cluster.gpus import MACHINES
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.ready_commands import compare_command, differences, dry_run_command, no_command
from minidist.planning.cluster.search import search

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
        alone = word in ("--sequence-parallel", "--dry-run")
        result[word[2:].replace("-", "_")] = True if alone else next(words)
    return result


def run(command, capsys):
    """The JSON object that a command prints; it must succeed."""
    program, *arguments = shlex.split(command)
    assert program == "minidist"
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", MODELS)
def test_minidist_accepts_the_commands_of_every_layout(name):
    for ranks, fixed in ((1, {}), (8, {}), (16, {}), (8, {"cp": 2}), (16, {"cp": 2, "tp": 2})):
        plans = search(Job(MODELS[name], 64, 32, "bf16", ranks), MACHINES["h100"], fixed).plans
        for plan in random.Random(ranks).sample(plans, min(5, len(plans))):
            commands = [compare_command(plan.layout, plan.job)]
            if no_command(plan.layout, plan.job) is None:
                commands.append(dry_run_command(plan.layout, plan.job))
            for command in commands:
                given = settings(command)
                given.pop("dry_run", None)
                config = TrainConfig.make(**given)
                dims = (config.dp or 1) * config.tp * config.pp * config.cp
                check_rules(config, resolve_batches(config, dims))


def test_a_dry_run_is_of_the_layout_itself():
    layout = ClusterLayout(2, 2, 2, zero=1, sequence_parallel=True, micro_batch=2, microbatches=4, recompute="full")
    job = Job(GPT, 64, 16, "bf16", 8)
    assert differences(layout, job) == []
    given = settings(dry_run_command(layout, job))
    for axis in ("dp", "tp", "pp", "zero", "micro_batch", "microbatches"):
        assert int(given[axis]) == getattr(layout, axis)
    assert [int(given[key]) for key in ("layers", "width", "heads", "context")] == [8, 64, 8, 64]
    assert (given["recompute"], given["sequence_parallel"], given["dry_run"]) == ("full", True, True)


def test_the_plan_of_a_job_file_prints_commands_that_run(tmp_path, capsys):
    path = tmp_path / "job.toml"
    path.write_text("layers = 4\nwidth = 32\nheads = 4\ncontext = 16\ntp = 2\npp = 2\nzero = 1\nglobal-batch = 8\n")
    arguments = ["plan", str(path), "--ranks", "8"]
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    commands = json.loads(capsys.readouterr().out)["commands"]
    dry = run(commands["dry_run"], capsys)
    assert (dry["ranks"], dry["dry_run"]) == (8, True)
    compared = run(commands["compare"], capsys)
    assert compared["equal"]
    assert compared["ranks"] == 8
    with pytest.raises(SystemExit):
        main(arguments)
    text = capsys.readouterr().out
    assert commands["dry_run"] in text
    assert commands["compare"] in text


def test_what_minidist_cannot_run_is_said():
    experts = Job(MODELS["gpt, experts"], 64, 32, "bf16", 4)
    reason = no_command(ClusterLayout(1, 4, ep=4, microbatches=32), experts)
    assert reason == "minidist divides experts among data-parallel ranks, and dp 1 is not divisible by ep 4"
    odd = Job(Architecture(2, 100, 3, 256, 64, 256, head_size=32), 64, 32, "bf16", 1)
    assert "100 is not divisible by 3" in no_command(ClusterLayout(microbatches=32), odd)
    large = Job(Architecture(2, 64, 4, 50257, 64, 300, gated=True), 64, 8, "fp8", 1)
    assert differences(ClusterLayout(microbatches=8), large) == [
        "a vocabulary of 256 in place of 50,257",
        "an inner size 172 in place of 300",
        "bf16 in place of fp8",
    ]
