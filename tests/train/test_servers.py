"""`--strategy ps`: one device's bits with bsp, a replay's with the others, and the bytes in closed form."""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from minidist.base.trace_file import read_traces
from minidist.base.traces import sequences
from minidist.comm import SimWorld
from minidist.comm.sim.choosers import replay, seeded
from minidist.commands.runner import run_comparison, run_training
from minidist.core.base.errors import UsageError
from minidist.course.lesson.mpi_leg import mpiexec
from minidist.job.checkpoint import Checkpoint
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.train.start import number_of_ranks
from minidist.job.train.strategies.data_axis import AxisSizes
from minidist.job.train.trainer import train
from minidist.job.train.update import NonFiniteError
from minidist.techniques.parameter_server.loop import compare_served, serve_and_keep
from minidist.techniques.parameter_server.ranks import parameter_server_bytes
from tests.cases import each

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"strategy": "ps", "layers": 1, "width": 16, "heads": 2, "context": 8, "steps": 3, "micro_batch": 2}


def config(**values):
    return TrainConfig.make(**{**SMALL, **values})


def compared(made, ranks, **options):
    world = SimWorld(ranks, **options)
    served = world.run(serve_and_keep, made)
    return compare_served(made, served, world.traces), served, world


@each(
    ("servers", "workers", "optimizer"),
    [(1, 1, "adamw"), (1, 3, "adamw"), (2, 2, "sgd"), (2, 2, "adamw"), (3, 5, "sgd"), (3, 4, "adamw"), (2, 8, "adamw")],
    sampled=4,
)
def test_bsp_is_one_device_bit_for_bit(servers, workers, optimizer):
    made = config(servers=servers, optimizer=optimizer, accumulation=2, dropout=0.1, weight_decay=0.1, warmup=2)
    for options in ({}, {"eager_bytes": 1 << 30, "chooser": seeded(4)}):
        verdict, served, _ = compared(made, servers + workers, **options)
        assert verdict.equal, verdict.first_difference
        assert (verdict.tier, verdict.bound, verdict.steps) == ("ordered", 0.0, 3)
        assert [len(s.updates) for s in served] == [3] * servers + [0] * workers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("consistency", ["delay:1", "ssp:0", "ssp:1", "asp"])
def test_the_others_are_a_replay_of_their_own_order(consistency):
    made, digests = config(servers=2, consistency=consistency, optimizer="adam"), set()
    for seed in range(3):
        verdict, served, _ = compared(made, 5, chooser=seeded(seed))
        assert verdict.equal, verdict.first_difference
        assert verdict.tier == "replay"
        digests.add(served[0].result.digest)
    assert len(digests) == 3  # an order a seed, and other bits with each


@each("consistency", ["bsp", "delay:1", "ssp:1", "asp"], sampled=7)
@each("values", [{"compression": "bf16"}, {"compression": "fp16", "model": "llama", "precision": "fp64"}])
def test_gradients_that_are_pushed_in_half_precision_are_those_of_the_replay(consistency, values, tmp_path):
    made = config(servers=2, consistency=consistency, optimizer="adam", clip=None, **values)
    verdict, *_ = compared(made, 5, chooser=seeded(1))
    assert verdict.equal, verdict.first_difference
    assert verdict.tier == "replay"
    assert verdict.losses != compared(config(servers=2, consistency=consistency), 5)[0].losses
    # A push has 2 B per element, whatever the weights have; the rest is as without compression.
    whole, half = (
        run_training(made.model_copy(update={"dp": 3, "compression": c}), None, 60.0, tmp_path / "t.jsonl")
        for c in ("none", made.compression)
    )
    assert whole.volumes_hold()
    assert half.volumes_hold()
    pushes = [run.bytes_by_purpose["parameter_push"]["measured"] for run in (whole, half)]
    pulls = [run.bytes_by_purpose["parameter_pull"]["measured"] for run in (whole, half)]
    assert pulls[0] == pulls[1]
    heads = 3 * 3 * 16 * 2
    times = 2 if made.precision == "fp32" else 3.5  # with llama, the numbers of rows are sent, too
    assert (pushes[0] - heads) / (pushes[1] - heads) >= times


# What one worker sends of a gradient of d elements, and of the matrices (m, k) and the other elements in it.
PUSHED = {
    "topk:0.05": lambda d, matrices, other: 8 * -(-d // 20),
    "topk:7": lambda d, matrices, other: 8 * 7,
    "sign": lambda d, matrices, other: 4 + -(-d // 8),
    "qsgd:15": lambda d, matrices, other: 4 + d,
    "powersgd:1": lambda d, matrices, other: 4 * (sum(m + k for m, k in matrices) + other),
}


@each("consistency", ["bsp", "delay:1", "ssp:1", "asp"], sampled=12)
@each("compression", PUSHED)
@each("model", ["gpt", "llama"])
def test_compressed_pushes_are_those_of_the_replay_and_their_bytes_the_closed_form(consistency, compression, model):
    made = config(servers=2, dp=3, consistency=consistency, compression=compression, model=model, steps=4)
    verdict, served, world = compared(made, 5, chooser=seeded(1))
    assert verdict.equal, verdict.first_difference
    assert verdict.tier == "replay"
    assert verdict.losses != compared(made.model_copy(update={"compression": "none"}), 5)[0].losses
    pushed, messages = 0, PUSHED[compression]
    for job in served[:2]:
        shapes = [array.shape for array in job.updates[0]["weights"].values()]
        matrices = [(m, k) for m, k in (shape for shape in shapes if len(shape) == 2) if m + k < m * k]
        size = sum(int(np.prod(shape)) for shape in shapes)
        pushed += 16 + messages(size, matrices, size - sum(m * k for m, k in matrices))
    assert sum(t.bytes_by_purpose().get("parameter_push", 0) for t in world.traces) == 3 * 4 * pushed
    assert (
        parameter_server_bytes(made, resolve_batches(made, 5), served[2].result.sizes[0])["parameter_push"]
        == 12 * pushed
    )


@each(("compression", "consistency"), [*((c, "bsp") for c in PUSHED), ("topk:7", "asp")])
def test_a_job_with_compressed_pushes_goes_on_with_its_residuals(compression, consistency, tmp_path):
    values = {"servers": 2, "dp": 3, "consistency": consistency, "compression": compression, "save": str(tmp_path)}
    whole = SimWorld(5).run(train, config(**values, steps=5))[0]
    for file in tmp_path.iterdir():  # begin anew
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    SimWorld(5).run(train, config(**values, steps=2))
    saved = Checkpoint(tmp_path)
    residuals = (
        [saved.tensor(f"local/residual/stage 0 tile 0/{w:05d}") for w in range(3)] if "q" not in compression else []
    )
    assert all(np.abs(residual).max() > 0 for residual in residuals)
    resumed = SimWorld(5).run(train, config(**values, steps=5, resume=True))[0]
    if consistency == "bsp":
        assert (resumed.digest, resumed.losses) == (whole.digest, whole.losses)
    if residuals:
        # Other workers go on with the same sum, and a job without residuals would lose it.
        other = {"resume": True, "global_batch": 6, "micro_batch": None, "from_step": 2, "dp": 2, "servers": 3}
        again = SimWorld(5).run(train, config(**{**values, **other, "steps": 3}))[0]
        assert again.losses[2] == pytest.approx(whole.losses[2], rel=0.1)
        with pytest.raises(UsageError, match="gradients that were not sent yet"):
            SimWorld(5).run(train, config(**{**values, "compression": "none", "steps": 9, "resume": True}))


@pytest.mark.parametrize("first", ["ps", "auto"])
def test_with_bsp_the_largest_elements_are_those_of_data_parallelism(first, tmp_path):
    """One server has one bucket, and adds the workers in rank order; a job goes on with the other's residuals."""
    made = config(dp=3, compression="topk:0.05", steps=6)
    alone = made.model_copy(update={"strategy": "auto"})
    whole = SimWorld(3).run(train, alone)[0].losses
    for steps in (2, 4, 6):
        job = made if (first == "ps") == (steps != 4) else alone
        change = {"save": str(tmp_path), "steps": steps, "resume": steps > 2}
        result = SimWorld(4 if job is made else 3).run(train, job.model_copy(update=change))[0]
    assert result.losses == whole


def test_staleness_aware_rates():
    digests = set()
    for aware in (False, True):
        verdict, served, _ = compared(config(consistency="asp", staleness_aware=aware), 4)
        assert verdict.equal, verdict.first_difference
        digests.add(served[0].result.digest)
    assert len(digests) == 2


@pytest.mark.exhaustive  # tests/parallel/test_parameter_server.py replays runs of servers and workers alone
@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
def test_a_run_under_mpi_is_replayed_in_the_simulated_world(tmp_path):
    """The order in which the servers' wildcards matched under MPI, chosen again: the same bits, the same messages."""
    consistency = "asp"
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in {**SMALL, "servers": 2, "consistency": consistency}.items()
    ]
    trace = tmp_path / "mpi.jsonl"
    command = [mpiexec(), "-n", "5", sys.executable, "-m", "minidist", "train", *flags, "--trace", str(trace), "--json"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path, check=True
    )
    summary, (traces, _) = json.loads(answer.stdout), read_traces(trace)
    assert all(volume["measured"] == volume["closed_form"] for volume in summary["bytes_by_purpose"].values())
    world = SimWorld(5, chooser=replay(traces))
    results = world.run(train, config(servers=2, consistency=consistency))
    assert results[0].digest == summary["digest"]
    assert results[0].losses == summary["losses"]
    assert [sequences(t) for t in world.traces] == [sequences(t) for t in traces]


def test_what_differs_is_named():
    made = config(servers=2, consistency="asp")
    world = SimWorld(4)
    served = world.run(serve_and_keep, made)
    served[1].updates[2]["optimizer"]["transformer.ln_f.weight.exp_avg_sq"][3] += 1e-9
    verdict = compare_served(made, served, world.traces)
    assert not verdict.equal
    assert "'transformer.ln_f.weight.exp_avg_sq' at step 2 on rank 1 differs" in verdict.first_difference
    served = world.run(serve_and_keep, made)
    del served[0].updates[-1]
    assert "server 0 made 5 updates, one device 6" in compare_served(made, served, world.traces).first_difference
    served = world.run(serve_and_keep, made)
    served[3].weights["transformer.ln_f.bias"] = np.ones(16, np.float32)
    assert "on rank 3" in compare_served(made, served, world.traces).first_difference


@each("consistency", ["bsp", "ssp:1", "asp"])
@each(("servers", "workers"), [(1, 2), (3, 2)])
def test_the_bytes_are_the_closed_form(consistency, servers, workers, tmp_path):
    made = config(servers=servers, dp=workers, consistency=consistency, accumulation=2)
    summary = run_training(made, None, 60.0, tmp_path / "t.jsonl", metrics=tmp_path / "m.jsonl")
    assert summary.ranks == servers + workers
    assert not read_traces(tmp_path / "t.jsonl")[1]["mesh"]  # servers stand on no axis
    assert summary.volumes_hold()
    assert set(summary.bytes_by_purpose) == {"startup", "parameter_push", "parameter_pull", "metrics"}
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == summary.losses
    # Each record is of the moment at which its step ended: the server has answered the workers of one step more.
    assert lines[0]["seconds"] < lines[1]["seconds"] < lines[2]["seconds"]
    pulls = [after["bytes_sent"] - before["bytes_sent"] for before, after in pairwise(lines)]
    assert min(pulls) > 0
    assert consistency != "bsp" or pulls[0] == pulls[1]  # elsewhere a worker may have pulled for the last time


def test_bytes_by_hand():
    """1 server, 2 workers, 3 steps, 10 elements of 4 B: 40 B of weights, a head of 16 B."""
    made = config(servers=1, dp=2)
    assert parameter_server_bytes(made, resolve_batches(made, 3), AxisSizes(0, False, [10], [], {"w": 10})) == {
        "startup": 2 * 40,
        "parameter_push": 6 * 56,
        "parameter_pull": 2 * 2 * 40 + 2 * 40,
        "metrics": 2 * 2 * 3 * 8,
    }


def tensors_of(path):
    checkpoint = Checkpoint(path)
    return {name: checkpoint.tensor(name).tobytes() for name in checkpoint.tensors}, checkpoint.state


def test_a_checkpoint_resumes_with_servers_or_without(tmp_path):
    """2 + 2 steps are 4, bit for bit, whichever half has servers: the checkpoint names tensors, not ranks."""
    common = {"optimizer": "adam", "warmup": 3, "global_batch": 6, "dropout": 0.1}
    alone = {"strategy": "auto", "reduction": "ordered"}
    ways = {"ps": (5, {"servers": 2}), "dp": (3, alone), "zero": (3, {**alone, "zero": 1})}

    def run(way, path, steps, resume):
        ranks, values = ways[way]
        return SimWorld(ranks).run(
            train, config(**common, **values, steps=steps, save=str(tmp_path / path), resume=resume)
        )[0]

    whole = run("dp", "whole", 4, False)
    expected, state = tensors_of(tmp_path / "whole")
    for first, second in (("ps", "ps"), ("ps", "dp"), ("dp", "ps"), ("zero", "ps")):
        run(first, f"{first}-{second}", 2, False)
        result = run(second, f"{first}-{second}", 4, True)
        assert (result.losses, result.first_step) == (whole.losses, 2)
        assert tensors_of(tmp_path / f"{first}-{second}") == (expected, state)


@pytest.mark.parametrize(("consistency", "model"), [("bsp", "gpt"), ("bsp", "llama"), ("delay:1", "gpt")])
def test_one_server_clips_as_one_device(consistency, model):
    made = config(clip=0.05, consistency=consistency, model=model, accumulation=2)
    verdict, served, _ = compared(made, 4)
    assert verdict.equal, verdict.first_difference
    plain = compared(config(consistency=consistency, model=model, accumulation=2), 4)[1]
    assert served[0].result.digest != plain[0].result.digest


@pytest.mark.parametrize("servers", [1, 2])
def test_checkpoints_between_the_steps_of_bsp(servers, tmp_path):
    """Any of them is the undisturbed run's, also as data parallelism, and the bytes are the closed form."""
    made = {"servers": servers, "optimizer": "adam", "warmup": 3, "dropout": 0.1, "global_batch": 6, "micro_batch": 2}
    made |= {"clip": 0.05} if servers == 1 else {}
    whole = SimWorld(3 + servers).run(train, config(**made, steps=5))[0]
    saving = {**made, "save": str(tmp_path / "a"), "every": 2}
    summary = run_training(config(**saving, dp=3, steps=5, keep=3), None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold()
    assert (summary.digest, summary.losses) == (whole.digest, whole.losses)
    assert sorted(path.name for path in (tmp_path / "a").glob("step-*")) == [f"step-0000000{n}" for n in (2, 4, 5)]
    for step in (2, 4):
        resumed = SimWorld(3 + servers).run(train, config(**saving, steps=5, resume=True, from_step=step))[0]
        assert (resumed.digest, resumed.losses, resumed.first_step) == (whole.digest, whole.losses, step)
    alone = {name: value for name, value in saving.items() if name != "servers"} | {"strategy": "auto"}
    resumed = SimWorld(3).run(train, config(**alone, steps=5, reduction="ordered", resume=True, from_step=4))[0]
    assert resumed.losses == whole.losses


def test_a_resumed_asynchronous_job_counts_its_bytes(tmp_path):
    made = {"servers": 2, "dp": 2, "consistency": "asp", "save": str(tmp_path)}
    metrics = tmp_path / "m.jsonl"
    run_training(config(**made, steps=2), None, 60.0, tmp_path / "t.jsonl", metrics=metrics)
    before = metrics.read_text()
    summary = run_training(config(**made, steps=5, resume=True), None, 60.0, tmp_path / "t.jsonl", metrics=metrics)
    assert summary.volumes_hold()
    assert metrics.read_text().startswith(before)  # the records of the steps that were made before stay
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert len(summary.losses) == 5
    assert Checkpoint(tmp_path).state["optimizer_steps"] == 2 * 5
    with pytest.raises(UsageError, match="raise --steps above 5"):
        run_training(config(**made, steps=5, resume=True), None, 60.0, tmp_path / "t.jsonl")


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_of_an_embedding_only_the_rows_that_occur_travel(servers, consistency, tmp_path):
    values = {"model": "llama", "servers": servers, "consistency": consistency, "optimizer": "adam", "accumulation": 2}
    verdict, _, world = compared(config(**values), servers + 2)
    assert verdict.equal, verdict.first_difference
    summary = run_training(config(**values, dp=2), None, 60.0, tmp_path / "t.jsonl")
    assert summary.volumes_hold()
    dense = 2 * 3 * sum(array.nbytes for array in world.run(serve_and_keep, config(**values))[0].weights.values())
    assert summary.bytes_by_purpose["parameter_push"]["measured"] < 0.8 * dense


@each("consistency", ["bsp", "delay:1", "asp"], sampled=6)
@each("values", [{}, {"model": "llama", "servers": 1}, {"model": "cnn", "context": 64, "heads": 4}])
def test_evaluations_change_nothing_and_are_of_the_weights_of_their_step(consistency, values, tmp_path):
    made = config(**{"servers": 2, "dp": 3, "steps": 5, "accumulation": 2, "consistency": consistency, **values})
    made = made.model_copy(update={"evaluate_every": 2})
    verdict, served, world = compared(made, 3 + made.servers)
    assert verdict.equal, verdict.first_difference
    # With an evaluation at another step the same held-out data leave training as it is, to the order of the messages.
    rarely = SimWorld(3 + made.servers)
    other = rarely.run(serve_and_keep, made.model_copy(update={"evaluate_every": 5}))
    assert [job.result.digest for job in other] == [job.result.digest for job in served]
    trained = [
        [(m.kind, m.peer, m.end) for trace in run.traces for m in trace.messages if m.purpose != "evaluation"]
        for run in (world, rarely)
    ]
    assert trained[0] == trained[1]
    assert list(served[0].result.held_out) == [2, 4]
    assert all(job.result.held_out == served[0].result.held_out for job in served)
    if consistency == "bsp":  # the losses of data parallelism; running statistics are averaged in another order there
        flat = {**made.model_dump(), "strategy": "auto", "servers": 1, "consistency": "bsp", "reduction": "ordered"}
        alone = SimWorld(3).run(train, TrainConfig.make(**flat))[0].held_out
        assert alone == (pytest.approx(served[0].result.held_out) if made.model == "cnn" else served[0].result.held_out)
    saving = {"save": str(tmp_path / "a"), "evaluate_every": 2}
    run_training(made.model_copy(update={**saving, "steps": 3}), None, 60.0, None)
    resumed = run_training(
        made.model_copy(update={**saving, "resume": True}), None, 60.0, None, metrics=tmp_path / "m.jsonl"
    )
    assert resumed.volumes_hold()
    assert list(resumed.held_out) == [4]
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line.get("held_out_loss") for line in lines] == [resumed.held_out[4], None]


def test_steps_are_spans_of_the_workers():
    world = SimWorld(3)
    world.run(train, config(servers=1))
    spans = [[s.name for s in trace.spans if s.category == "step"] for trace in world.traces]
    assert spans == [[], ["step 0", "step 1", "step 2"], ["step 0", "step 1", "step 2"]]
    assert {s.name for s in world.traces[1].spans} >= {"forward", "backward"}


def test_more_servers_than_parameters_hold_nothing():
    made = config(model="mlp", layers=1, servers=6, global_batch=4, micro_batch=2)
    verdict, served, _ = compared(made, 8)
    assert verdict.equal, verdict.first_difference
    assert [len(s.updates[0]["weights"]) for s in served[:6]] == [1, 1, 1, 1, 0, 0]


def test_the_number_of_ranks():
    assert number_of_ranks(config(servers=2, dp=3), None) == 5
    assert number_of_ranks(config(servers=2), 5) == 5
    assert resolve_dims(config(servers=2), 5).dp == 3
    assert run_comparison(config(servers=1, dp=2), None, 60.0).ranks == 3


def test_a_worker_whose_loss_is_not_finite_is_named():
    with pytest.raises(NonFiniteError, match=r"worker \d, step \d: the loss is (nan|inf); lower --lr"):
        SimWorld(3).run(train, config(optimizer="sgd", lr=1e30, steps=8))


BAD = {
    "servers": ({"servers": 3}, 3, "--servers 3 of 3 ranks leave no worker"),
    "ranks": (
        {"servers": 2, "dp": 3},
        4,
        "--dp 3 workers and --servers 2 are not 4 ranks; use --dp 2, or start 5 ranks",
    ),
    "bound": ({"consistency": "ssp:-2"}, 3, "bound -2; it must be at least 0"),
    "name": ({"consistency": "ssp"}, 3, "it must be bsp, asp, ssp:S or delay:T"),
}


@each("what", BAD)
def test_wrong_flags(what):
    values, ranks, sentence = BAD[what]
    made = config(**values)
    with pytest.raises(UsageError, match=sentence):
        check_rules(made, resolve_batches(made, ranks))
