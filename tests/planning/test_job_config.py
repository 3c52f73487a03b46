"""A job file of `minidist train` is planned as the model that it trains, with what it fixes."""

import json
from pathlib import Path

import pytest

from minidist.core.base.errors import UsageError
from minidist.data import load_dataset
from minidist.job.config.config_file import read_config
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig
from minidist.planning.job_config import architecture, read_job

SIZES = {"layers": 3, "width": 32, "heads": 4, "context": 16, "data": "markov"}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Errors name the file, so its path is short."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": "llama"},
        {"model": "llama", "kv_heads": 2, "width": 48},
        {"experts": 4, "top_k": 2},
        {"model": "llama", "experts": 4, "top_k": 1},
    ],
    ids=str,
)
def test_the_parameters_are_those_of_the_model_that_is_trained(settings):
    config = TrainConfig.make(**{**SIZES, **settings})
    model = make_model(config, load_dataset("markov"))
    assert architecture(config).parameters == sum(p.size for p in model.parameters())


def test_what_the_file_of_print_config_gives_is_fixed(minidist):
    flags = ["--layers", "8", "--width", "64", "--tp", "2", "--zero", "1", "--global-batch", "16"]
    path = Path("job.toml")
    more = ["--precision", "bf16", "--lr", "0.1", "--data", "markov", "--print-config"]
    path.write_text(minidist("train", *flags, *more).out)
    assert read_config(path)["lr"] == 0.1
    job = read_job(path)
    assert (job.fixed, job.global_batch, job.precision) == ({"tp": 2, "zero": 1}, 16, "bf16")

    def planned(*more):
        return json.loads(minidist("plan", path, "--ranks", "8", "--json", *more).out)["layouts"]

    assert {(one["tp"], one["zero"]) for one in planned()} == {(2, 1)}
    assert {(one["tp"], one["zero"]) for one in planned("--tp", "4")} == {(4, 1)}  # a flag overrides the file


def test_the_size_of_a_micro_batch_follows_from_their_number():
    path = Path("job.toml")
    path.write_text("dp = 2\npp = 2\nglobal-batch = 16\nmicrobatches = 4\nschedule = 'interleaved'\nchunks = 1\n")
    assert read_job(path).fixed == {"dp": 2, "pp": 2, "micro_batch": 2, "vp": 1}
    path.write_text("dp = 2\nmicro-batch = 'auto'\n")
    assert read_job(path).fixed == {"dp": 2}  # the planner searches it
    path.write_text("microbatches = 4\n")
    with pytest.raises(
        UsageError, match=r"4 micro-batches in 'job.toml' give no size of one; give micro-batch, or global"
    ):
        read_job(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model = 'mlp'", "model 'mlp' in 'job.toml' is not planned; give model = 'gpt' or 'llama'"),
        ("compression = 'fp16'", "compression 'fp16' in 'job.toml' is not planned; leave it out"),
        ("optimizer = 'sgd'", "optimizer 'sgd' in 'job.toml' is not planned, because memory is counted with"),
        ("schedule = 'gpipe'", "schedule 'gpipe' in 'job.toml' is not planned; give schedule = '1f1b' or 'int"),
        (
            "recompute = 'budget:9'",
            "recompute 'budget:9' in 'job.toml' is not planned; give one of none, selective, full, sqrt",
        ),
        ("", "the job file 'job.toml' has no settings; write one with minidist train --print-config"),
        ("[model]", "the job file 'job.toml' has no settings"),
        ("colour = 3", "job.toml: unknown setting 'colour'.*; correct its name, or leave it out"),
        ("layers = ", "the job file 'job.toml' is not TOML"),
        ("layers = 0", "'job.toml': --layers 0: input should be greater than or equal to 1"),
        ("heads = 5", "'job.toml': width 64 is not divisible by heads 5; change one of them"),
        ("model = 'llama'\nkv-heads = 3", "'job.toml': heads 4 is not divisible by kv-heads 3; give a number of key-v"),
        ("data = 'nothing'", "'job.toml': --data nothing: no such data"),
        ("precision = 'fp32'", "--precision 'fp32'; it must be fp16, bf16, fp8"),
    ],
)
def test_what_is_wrong_is_one_sentence(text, sentence, minidist):
    path = Path("job.toml")
    path.write_text(text + "\n")
    (line,) = minidist("plan", path, "--ranks", "2", "--global-batch", "4", code=2).err.splitlines()
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(line)


def test_a_model_is_described_once(minidist):
    path = Path("job.toml")
    path.write_text("layers = 2\n")
    assert (
        "--layers describes a model, and"
        in minidist("plan", path, "--layers", "3", "--ranks", "2", "--global-batch", "4", code=2).err
    )
