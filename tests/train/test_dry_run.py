"""A dry run sends the bytes of the real run, holds its memory at every moment, and takes its virtual time, exactly."""

import json
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import astuple
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from minidist.base.memory import MemoryAccount
from minidist.base.meta import creating_meta
from minidist.comm import SimWorld
from minidist.commands.dry_run import links_of
from minidist.job.checkpoint.dry_storage import DTYPES, file_bytes
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.planning.cluster.gpus import MACHINES
from tests.cases import each

SMALL = {"data": "markov", "layers": 4, "width": 16, "heads": 2, "context": 8, "steps": 2, "global_batch": 8}


def run(ranks, meta, settings, monkeypatch):
    """Return (peaks, sizes, messages, every change of memory, virtual seconds) of a job."""
    changes = {}
    original = MemoryAccount.change

    def recording(self, purpose, nbytes):
        changes.setdefault(id(self), (self, []))[1].append((purpose, nbytes))
        original(self, purpose, nbytes)

    def program(comm):
        with creating_meta() if meta else nullcontext():
            return train(comm, config)

    config = TrainConfig.make(**{**SMALL, **settings})
    world = SimWorld(ranks, checks=False)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryAccount, "change", recording)
        results = world.run(program)
    messages = [[astuple(message) for message in trace.messages] for trace in world.traces]
    return (
        [result.peak_by_purpose for result in results],
        [result.sizes for result in results],
        messages,
        # An account of an earlier test may hear only now that its arrays are gone.
        sorted(ordered(events) for _, events in changes.values() if events[0][1] > 0),
        world.end_time,
    )


def ordered(events):
    """Return the changes of memory with arrays that are freed at one moment in the order of their sizes.

    What is freed when the program ends is left out: that may be later than the end.
    """
    groups = [list(group) for _, group in groupby(events, lambda event: event[1] < 0)]
    del groups[-1 if groups[-1][0][1] < 0 else len(groups) :]
    return [event for group in groups for event in (sorted(group) if group[0][1] < 0 else group)]


JOBS = [
    (1, {}),
    (2, {"dp": 2, "clip": 1.0, "dropout": 0.1}),
    (2, {"dp": 2, "zero": 1, "accumulation": 2, "optimizer": "lamb"}),
    (2, {"dp": 2, "zero": 2, "precision": "bf16", "offload": "optimizer"}),
    (2, {"dp": 2, "zero": 3, "recompute": "full"}),
    (2, {"dp": 2, "precision": "fp16", "recompute": "selective"}),
    (2, {"dp": 2, "experts": 4, "ep": 2}),
    (2, {"dp": 2, "compression": "topk:0.1"}),
    (2, {"dp": 2, "compression": "sign"}),
    (2, {"dp": 2, "local_steps": 2, "optimizer": "sgd", "momentum": 0.9}),
    (2, {"dp": 2, "quantize": "int8"}),
    (2, {"dp": 2, "model": "mlp", "data": "glyphs"}),
    (2, {"dp": 2, "model": "cnn", "data": "glyphs", "batch_norm": "sync"}),
    (2, {"dp": 2, "noise_scale": True}),
    (3, {"dp": 3, "sparsity": 0.7, "sparsity_schedule": "1,3", "steps": 4, "global_batch": 6, "bucket_cap_mb": 0.004}),
    (2, {"dp": 2, "sparsity_pattern": "2:4", "sparsity_schedule": "1", "precision": "bf16", "evaluate_every": 1}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "sparsity": 0.5, "sparsity_schedule": "1", "clip": 1.0}),
    (2, {"dp": 2, "evaluate_every": 1, "zero": 3}),
    (2, {"tp": 2, "sequence_parallel": True, "offload": "activations", "recompute": "full"}),
    (2, {"cp": 2, "model": "llama", "kv_heads": 1, "ffn": 90}),
    (2, {"cp": 2, "attention": "ulysses"}),
    (2, {"pp": 2, "microbatches": 4, "precision": "fp16", "clip": 1.0}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "zb-v"}),
    (2, {"pp": 2, "schedule": "pipedream"}),
    (2, {"pp": 2, "microbatches": 2, "evaluate_every": 2}),
    (1, {"evaluate_every": 1, "quantize": "int8"}),
    (4, {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "interleaved", "zero": 1}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "zero": 3}),
    (8, {"dp": 2, "pp": 2, "tp": 2, "microbatches": 2, "zero": 1, "precision": "bf16", "sequence_parallel": True}),
    (3, {"strategy": "ps"}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ranks", "settings"), JOBS, ids=lambda value: str(value).strip("{}").replace("'", ""))
def test_a_dry_run_equals_the_real_one(ranks, settings, monkeypatch):
    real, dry = run(ranks, False, settings, monkeypatch), run(ranks, True, settings, monkeypatch)
    for what, expected, found in zip(("peaks", "sizes", "messages", "memory", "seconds"), real, dry, strict=True):
        assert found == expected, what


def test_a_teacher_on_a_rank_of_its_own(tmp_path, monkeypatch):
    """Its logits have 131,072 elements, more than a meta array gives to NumPy as ones."""
    job = {"data": "pydoc", "layers": 1, "width": 8, "context": 64, "steps": 1}
    SimWorld(1).run(train, TrainConfig.make(**{**SMALL, **job, "save": str(tmp_path)}))
    settings = {**job, "distill_from": str(tmp_path), "teacher_ranks": 1}
    real, dry = run(2, False, settings, monkeypatch), run(2, True, settings, monkeypatch)
    assert dry == real


@each(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {"dp": 2, "zero": 1, "precision": "bf16"}),
        (2, {"dp": 2, "zero": 3, "optimizer": "sgd"}),
        (4, {"pp": 2, "tp": 2, "microbatches": 2}),
        (2, {"dp": 2, "experts": 4, "ep": 2}),
        (2, {"dp": 2, "compression": "topk:0.1"}),
        (2, {"dp": 2, "sparsity": 0.7, "sparsity_schedule": "1"}),
        (4, {"pp": 2, "dp": 2, "microbatches": 2, "sparsity_pattern": "2:4", "sparsity_schedule": "1"}),
        # Parameters of more elements than a meta array gives to NumPy as ones.
        (2, {"tp": 2, "width": 320, "layers": 1, "steps": 1}),
        (2, {"dp": 2, "width": 160, "layers": 2, "steps": 1, "compression": "sign"}),
    ],
    sampled=4,
)
def test_a_checkpoint_has_the_bytes_of_the_real_one_and_no_file(ranks, settings, tmp_path):
    def sizes(folder, meta):
        config = TrainConfig.make(**{**SMALL, **settings, "save": str(folder)})

        def program(comm):
            with creating_meta() if meta else nullcontext():
                return train(comm, config)

        world = SimWorld(ranks, checks=False)
        written = [result.checkpoint_bytes[rank] for rank, result in enumerate(world.run(program))]
        return written, [trace.bytes_by_purpose() for trace in world.traces], world.end_time

    real, dry = sizes(tmp_path / "real", False), sizes(tmp_path / "dry", True)
    assert dry == real
    files = [path.stat().st_size for path in sorted((tmp_path / "real").glob("step-*/*.safetensors"))]
    assert files == [nbytes for nbytes in real[0] if nbytes]
    assert not (tmp_path / "dry").exists()


def test_the_size_of_a_file_of_tensors():
    from safetensors.numpy import save

    rng = np.random.default_rng(0)
    for _ in range(30):
        dtypes = rng.choice([name for name in DTYPES if name != "bfloat16"], size=rng.integers(1, 14))
        tensors = {
            f"{i}": np.zeros(tuple(rng.integers(0, 5, rng.integers(0, 4))), name) for i, name in enumerate(dtypes)
        }
        assert file_bytes(tensors) == len(save(tensors))


def test_a_model_that_fits_no_laptop(minidist):
    sizes = ["--model", "llama", "--layers", "2", "--width", "16384", "--heads", "128", "--kv-heads", "8"]
    job = ["--dp", "2", "--pp", "2", "--microbatches", "2", "--steps", "1", "--context", "1024", "--data", "markov"]
    result = json.loads(
        minidist(
            "train", *sizes, *job, "--dry-run", "--gpu", "h100", "--precision", "bf16", "--trace", "none", "--json"
        ).out
    )
    assert result["dry_run"]
    assert all(volume["measured"] == volume["closed_form"] for volume in result["bytes_by_purpose"].values())
    # Two layers of 3.1e9 parameters: 16 bytes for each on its stage.
    assert min(result["peak_bytes"]) > 14 * 3e9
    assert 0 < result["virtual_seconds"] < 60
    assert 0 < result["mfu"] < 1
    assert "losses" not in result


def test_an_evaluation_has_bytes_and_no_loss(minidist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = ["--tp", "2", "--steps", "2", "--evaluate-every", "1", "--data", "markov", "--trace", "none", "--save", "new"]
    assert "tensors of a checkpoint: " in minidist("train", *job, "--dry-run").out
    result = json.loads(minidist("train", *job, "--dry-run", "--json").out)
    assert len(result["checkpoint_bytes"]) == 2
    assert not Path("new").exists()
    volume = result["bytes_by_purpose"]["evaluation"]
    assert volume["measured"] == volume["closed_form"] > 0
    assert not result.get("held_out")


def test_what_a_dry_run_prints(minidist, tmp_path):
    trace = tmp_path / "trace.jsonl"
    job = ["--dp", "2", "--pp", "2", "--microbatches", "4", "--layers", "4", "--data", "markov", "--steps", "2"]
    text = minidist("train", *job, "--dry-run", "--trace", str(trace)).out
    assert "dry run of 4 ranks, 2 steps of 32 samples of 64 tokens: " in text
    assert "% of them without computing, MFU " in text
    assert "DIFFERENT" not in text
    assert "peak of rank 0, the fullest, in bytes: " in text
    assert trace.exists()


@each(
    ("flags", "sentence"),
    [
        (["--save", "runs/x", "--resume"], "--resume needs values"),
        (["--adaptive-batch", "64"], "--adaptive-batch '64' needs values"),
        (["--distill-from", "x", "--teacher-cache", "y"], "--teacher-cache 'y' needs values"),
        (
            ["--sparsity", "0.5", "--sparsity-schedule", "1", "--sparsity-scope", "global"],
            "--sparsity-scope 'global' needs values",
        ),
        (["--sparsity", "0.5", "--sparsity-schedule", "1", "--zero", "2"], "--sparsity with --zero '2' needs values"),
        (["--gpu", "h1000"], "--gpu 'h1000' is unknown"),
    ],
)
def test_what_needs_values_is_refused(flags, sentence, minidist):
    assert sentence in minidist("train", "--dp", "2", "--dry-run", *flags, code=2).err


def test_a_clock_without_a_dry_run_is_refused(minidist):
    assert "add --dry-run" in minidist("train", "--dp", "2", "--gpu", "h100", code=2).err


def test_the_comparison_finds_a_difference(monkeypatch):
    real = run(2, False, {"dp": 2}, monkeypatch)
    other = run(2, True, {"dp": 2, "width": 18}, monkeypatch)
    assert all(expected != found for expected, found in zip(real, other, strict=True))
    assert np.isfinite(real[-1])


MACHINE = "fp16 = 1e12\nmemory = {}\nmemory_bandwidth = 1e11\nlink = 1e10\nnetwork = 1e9\n"


def test_a_dry_run_says_whether_it_fits(minidist, tmp_path, monkeypatch):
    """The peak of steps that begin with the optimizer's states, against the GPU's memory; exit code 1 as of a plan."""
    monkeypatch.chdir(tmp_path)
    job = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--zero", "1", "--dp", "2"]

    def run(memory, steps, *more, code=0):
        (tmp_path / "mine.toml").write_text(MACHINE.format(memory))
        words = ["train", "--dry-run", "--model", "gpt", "--gpu", "mine.toml", *job, "--steps", steps, *more]
        return minidist(*words, code=code).out

    # Two steps show the optimizer's states in the peak; of one step they are added to it.
    two = json.loads(run(2e9, "2", "--json"))
    peak = max(sum(split.values()) for split in two["step_peak_by_purpose"])
    assert (two["fits"], two["fits_with_range"], two["margin_bytes"]) == (True, True, 1_000_000_000 - peak)
    one = json.loads(run(2e9, "1", "--json"))
    assert max(sum(split.values()) for split in one["step_peak_by_purpose"]) < peak
    assert one["margin_bytes"] == two["margin_bytes"]
    low, high = re.search(r"states: ([\d,]+) to ([\d,]+) \(exact with --steps 2\)", run(2e9, "1")).groups()
    assert int(low.replace(",", "")) == peak < int(high.replace(",", "")) < 1.1 * peak

    # The reserved 1 GB, the peak, and the range above it.
    for memory, code, verdict in ((1e9 + peak, 0, "may not fit: "), (1e9 + peak - 1, 1, "does not fit: ")):
        text = run(memory, "1", code=code)
        assert (verdict in text, "at peak speeds" in text) == (True, True), memory


def test_the_pass_by_which_a_pipeline_learns_shapes_is_startup():
    """What its layers send, and the units that ZeRO 3 gathers, are no part of a step: each step sends and takes as much
    as the first one.
    """
    for more in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero": 3}):
        settings = {**SMALL, "model": "gpt", "pp": 2, "microbatches": 2, "reduction": "ring", **more}
        sent, seconds = [], []
        for steps in (1, 2, 3):
            config = TrainConfig.make(**{**settings, "steps": steps})

            def program(comm, config=config):
                with creating_meta():
                    return train(comm, config)

            world = SimWorld(4, checks=False, links=links_of(MACHINES["h100"], "bf16"))
            world.run(program)
            sent.append(sum((Counter(trace.bytes_by_purpose()) for trace in world.traces), Counter()))
            seconds.append(world.end_time)
        assert sent[0]["startup"] == sent[1]["startup"], more
        assert sent[1] - sent[0] == sent[0] - Counter(startup=sent[0]["startup"]), more
        assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=1e-9), more
