"""Where a job's model is cut: sizes, parameters and measured times; equal to one device wherever it is."""

import json
import sys
import time

import pytest

from minidist import cli
from minidist.commands import profile
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP, Module
from minidist.job.config.pipeline_plan import stage_sizes
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.start import number_of_ranks
from minidist.pipeline.partition import by_slowest, read_profile
from minidist.planning import profiler
from minidist.planning.profiler import profile_layers
from tests.equality.test_equality import verdict

SMALL = {"width": 8, "heads": 2, "context": 6, "data": "markov", "steps": 2, "micro_batch": 2, "reduction": "ordered"}


class Slow(Module):
    """A layer that takes this number of milliseconds longer each way."""

    def __init__(self, layer, milliseconds):
        self.layer, self.seconds = layer, milliseconds / 1000

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("partition", ["3,1", "1,3", "parameters", "uniform"])
@pytest.mark.parametrize("values", [{}, {"model": "llama"}, {"schedule": "zb-h1", "clip": 0.1, "dp": 2}])
def test_an_uneven_split_equals_one_device(partition, values):
    values = {**SMALL, "layers": 4, "pp": 2, "microbatches": 3, "partition": partition, **values}
    result = verdict(2 * values.get("dp", 1), **values)
    assert result.equal, result.first_difference


def test_a_profile_is_cut_by_forward_and_backward_together(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps([{"op": "", "fwd_ms": 1, "bwd_ms": ms, "act_bytes": 0, "param_bytes": 0} for ms in (9, 1, 1, 1)])
    )
    assert stage_sizes(str(path), MLP([8, 8, 8, 8, 2]), 2) == [1, 3]


def test_the_profile_sees_the_slow_layer_and_the_cut_avoids_it(monkeypatch, tmp_path):
    config = TrainConfig.make(model="mlp", layers=3, width=8, data="glyphs", micro_batch=4)
    build = profiler.build

    def slow(*arguments):
        job = build(*arguments)
        job.model.layers[0] = Slow(job.model.layers[0], 20)
        return job

    monkeypatch.setattr(profiler, "build", slow)
    layers = profile_layers(config, 2)
    assert [layer.op for layer in layers] == ["block 0", "block 1", "block 2", "block 3 + head"]
    assert layers[0].fwd_ms > 15 > max(layer.fwd_ms for layer in layers[1:])
    assert all(layer.bwd_ms > 0 for layer in layers)
    assert [layer.act_bytes for layer in layers[:3]] == [4 * 8 * 4] * 3
    assert layers[1].param_bytes == (8 * 8 + 8) * 4
    path = tmp_path / "profile.json"
    path.write_text(json.dumps([vars(layer) for layer in layers]))
    assert read_profile(str(path)) == layers
    assert stage_sizes(str(path), MLP([8, 8, 8, 8, 2]), 2) == [1, 3]
    assert [s.last + 1 for s in by_slowest([x.fwd_ms for x in layers], 2)] == [1, 4]
    result = verdict(
        2,
        model="mlp",
        layers=3,
        width=8,
        data="glyphs",
        steps=2,
        pp=2,
        microbatches=2,
        partition=str(path),
        reduction="ordered",
    )
    assert result.equal, result.first_difference


@pytest.mark.parametrize("values", [{"model": "gpt"}, {"model": "llama"}, {"model": "gpt", "experts": 2}])
def test_every_model_can_be_profiled(values):
    layers = profile_layers(TrainConfig.make(**{**SMALL, "layers": 2, **values}), 1)
    assert [layer.op for layer in layers] == ["embedding + block 0", "block 1 + head"]
    assert min(layer.bwd_ms for layer in layers) > 0


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"partition": "2,3"}, "cuts .2, 3. do not make 2 stages of 4 layers"),
        ({"partition": "tim"}, "--partition 'tim'; it must be uniform"),
        ({"partition": "none.json"}, "the profile 'none.json' cannot be read"),
        ({"partition": "3,1", "pp": 1}, "cuts a pipeline's stages; add --pp 2"),
    ],
)
def test_wrong_partitions_are_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        number_of_ranks(TrainConfig.make(**{**SMALL, "layers": 4, "pp": 2, **values}), None)


def test_a_profile_of_another_model_is_refused(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"op": "x", "fwd_ms": 1, "bwd_ms": 1, "act_bytes": 0, "param_bytes": 0}] * 3))
    with pytest.raises(UsageError, match="has 3 layers and the model 2 blocks; measure this model: minidist profile"):
        stage_sizes(str(path), MLP([2, 2, 2]), 2)


def test_a_job_takes_over_the_planners_stages_and_replicas(minidist, tmp_path):
    """The first layer is so slow that the optimizer gives its stage two machines; the job equals its replay."""
    path, decided = tmp_path / "p.json", tmp_path / "decided.json"
    layers = [{"op": "x", "fwd_ms": ms, "bwd_ms": ms, "act_bytes": 8, "param_bytes": 8} for ms in (6, 1, 1, 1)]
    path.write_text(json.dumps(layers))
    decided.write_text(minidist("partition", path, "--machines", "3", "--bandwidth", "1e9", "--json").out)
    assert [stage["replicas"] for stage in json.loads(decided.read_text())["stages"]] == [2, 1]

    values = {"model": "mlp", "data": "glyphs", "layers": 3, "width": 8, "micro_batch": 2, "steps": 5, "pp": 3}
    values |= {"partition": str(decided), "schedule": "pipedream", "reduction": "ordered"}
    assert number_of_ranks(TrainConfig.make(**values), None) == 3
    result = verdict(3, **values)
    assert result.equal, result.first_difference
    same = verdict(3, **{**values, "partition": "1,3", "replicas": "2,1"})
    assert same.losses == result.losses

    for change, sentence in (
        ({"schedule": "1f1b"}, "--replicas 2,1 copies stages of --schedule pipedream, not of 1f1b"),
        ({"pp": 2}, "replicas=.2, 1. make 3 ranks and there are 2"),
    ):
        with pytest.raises(UsageError, match=sentence):
            number_of_ranks(TrainConfig.make(**{**values, **change}), None)
    decided.write_text('{"stages": [{"first": 1, "last": 3, "replicas": 1}]}')
    with pytest.raises(UsageError, match=r"stage 0 is .*; it must have whole numbers first \(0\), last, which"):
        number_of_ranks(TrainConfig.make(**values), None)


def test_the_commands(capsys, monkeypatch, tmp_path):
    path = str(tmp_path / "p.json")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["minidist"])
        try:
            cli.main([*map(str, arguments)])
        except SystemExit as ended:
            code = ended.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    small = ("--model", "mlp", "--layers", 3, "--width", 8, "--rounds", 1)
    code, out, err = call("profile", *small, "-o", path)
    assert (code, "written: " in err) == (0, True)
    head, *rows = out.splitlines()
    assert head.split() == ["block", "forward", "backward", "output", "parameters"]
    assert [row.split()[-2] for row in rows] == ["4,640", "288", "288", "360"]
    code, out, _ = call("profile", *small, "--json")
    assert [row["op"] for row in json.loads(out)] == ["block 0", "block 1", "block 2", "block 3 + head"]
    monkeypatch.setattr(profile, "SECONDS_BETWEEN_LINES", 0.0)
    assert "profile: 1/1 rounds" in call("profile", *small)[2]
    code, out, _ = call("partition", path, "--machines", 2, "--method", "time", "--json")
    assert code == 0
    assert set(json.loads(out)) == {"slowest_stage_seconds", "stages"}
    assert [stage["replicas"] for stage in json.loads(out)["stages"]] == [1, 1]
    assert call("partition", path, "--machines", 2, "--bandwidth", 1e9)[0] == 0
    for arguments, sentence in [
        ((), "--method pipedream needs --bandwidth"),
        (("--method", "time", "--bandwidth", 1e9), "looks at no link"),
        (("--method", "x"), "--method 'x'"),
    ]:
        code, out, err = call("partition", path, "--machines", 2, *arguments)
        assert (code, out) == (2, "")
        assert sentence in err
