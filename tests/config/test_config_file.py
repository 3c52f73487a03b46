"""A job in a file: the same settings as flags, flags first, and one sentence for what is wrong."""

import json
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.core.base.errors import UsageError
from minidist.job.config.config_file import read_config, read_overrides
from minidist.job.config.train_config import TrainConfig
from tests.cases import each

TOML = """
steps = 2
[model]
width = 24
context = 8
[axes]
dp = 2
tp = 2
sequence-parallel = true
"""


def test_tables_only_arrange(tmp_path):
    (tmp_path / "job.toml").write_text(TOML)
    (tmp_path / "job.json").write_text(
        json.dumps({"steps": 2, "a": {"width": 24, "b": {"context": 8}}, "dp": 2, "tp": 2, "sequence_parallel": True})
    )
    settings = {"steps": 2, "width": 24, "context": 8, "dp": 2, "tp": 2, "sequence_parallel": True}
    assert read_config(tmp_path / "job.toml") == read_config(tmp_path / "job.json") == settings


def test_a_flag_overrides_the_file(tmp_path, minidist):
    (tmp_path / "job.toml").write_text(TOML)
    summary = json.loads(
        minidist(
            "train", "--config", tmp_path / "job.toml", "--dp", "1", "--json", "--trace", tmp_path / "trace.jsonl"
        ).out
    )
    assert (summary["ranks"], len(summary["losses"])) == (2, 2)
    assert "regather" in summary["bytes_by_purpose"]


@each(
    ("name", "content", "sentence"),
    [
        ("job.toml", "[axes]\ntpp = 2", r"unknown setting 'axes\.tpp' \(did you mean 'tp'\?\)"),
        ("job.toml", "tp = 2\n[axes]\ntp = 4", r"'tp' appears twice, the second time as 'axes\.tp'"),
        ("job.toml", "tp = ", "is not TOML"),
        ("job.json", "{", "is not JSON"),
        ("job.json", "[1]", "is of type list; it must be a table"),
        ("job.json", "[" * 100_000, "is not JSON"),
        ("job.yaml", "tp: 2", r"must be a \.toml or a \.json file"),
        ("none.toml", None, "No such file"),
    ],
)
def test_what_is_wrong_is_one_sentence(name, content, sentence, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=sentence):
        read_config(tmp_path / name)


def test_a_wrong_value_is_that_of_the_flag(tmp_path, minidist):
    (tmp_path / "job.toml").write_text('[optimization]\noptimizer = "adan"')
    assert "--optimizer 'adan'" in minidist("train", "--config", tmp_path / "job.toml", code=2).err


def test_a_dotted_override_is_stronger_than_the_file_and_weaker_than_a_flag(tmp_path, minidist):
    (tmp_path / "job.toml").write_text(TOML)
    job = ["train", "--config", str(tmp_path / "job.toml"), "--set", "axes.dp=1", "--set", "steps=5", "--steps", "1"]
    summary = json.loads(minidist(*job, "--json", "--trace", tmp_path / "trace.jsonl").out)
    assert (summary["ranks"], len(summary["losses"])) == (2, 1)


def test_an_override_is_a_toml_value_or_a_word():
    words = ["optimization.lr=1e-2", "a.b.sequence-parallel=true", "optimizer=sgd", 'data="text:a=b"', "dp = 3"]
    assert read_overrides(words) == {
        "lr": 0.01,
        "sequence_parallel": True,
        "optimizer": "sgd",
        "data": "text:a=b",
        "dp": 3,
    }
    for text, sentence in (("axes.tp", "KEY=VALUE"), ("axes.tpp=2", r"'axes\.tpp' \(did you mean 'tp'\?\)")):
        with pytest.raises(UsageError, match=sentence):
            read_overrides([text])
    with pytest.raises(UsageError, match="'tp' appears twice"):
        read_overrides(["tp=2", "axes.tp=4"])


def test_the_printed_config_is_a_config_file_of_the_same_job(tmp_path, minidist):
    arguments = ["--pp", "2", "--optimizer", "sgd", "--clip", "0.5", "--sequence-parallel", "--seed", "7"]
    (tmp_path / "job.toml").write_text(minidist("train", *arguments, "--print-config").out)
    printed = TrainConfig.make(**read_config(tmp_path / "job.toml"))
    assert printed == TrainConfig.make(pp=2, optimizer="sgd", clip=0.5, sequence_parallel=True, seed=7)


def test_a_printed_config_without_choices_leaves_them_to_the_command(tmp_path, capsys, minidist):
    """`train` adds gradients in a ring, and `compare` in the order of one device, where the user has chosen neither."""
    file, model = tmp_path / "job.toml", ["--model", "mlp", "--width", "8", "--dp", "3", "--steps", "1"]
    file.write_text(minidist("train", *model, "--print-config").out)
    assert '# reduction = "ring"' in file.read_text()
    with pytest.raises(SystemExit) as end:
        main(["compare", "--config", str(file), "--json"])
    verdict = json.loads(capsys.readouterr().out)
    assert (end.value.code or 0, verdict["tier"], verdict["equal"]) == (0, "ordered", True)


def test_the_example_of_a_job_trains_on_its_four_ranks(tmp_path, minidist):
    example = Path(__file__).resolve().parents[2] / "mpi_examples" / "job.toml"
    printed = minidist("train", "--config", example, "--steps", "4", "--trace", tmp_path / "t.jsonl", "--json").out
    assert json.loads(printed)["ranks"] == 4


def test_wrong_input_of_the_command_line_has_no_line_of_a_program(minidist):
    error = minidist("train", "--warmup", "2", "--steps", "2", "--decay", "cosine", code=2).err
    assert error == "minidist: 2 warm-up steps of 2; the warm-up must end before the last step\n"


def test_the_help_of_train_has_a_panel_for_each_axis(minidist, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = minidist("train", "--help").out
    for panel in ("Data", "Pipeline", "Context", "Tensor", "Expert"):
        assert f" {panel} parallelism " in text
    assert "(sgd|adagrad|rmsprop|adam|adamw|lars|lamb|muon)" in text.replace("\n", "").replace("│", "").replace(" ", "")
    assert "(none|optimizer|activations|parameters)" in text.replace("\n", "").replace("│", "").replace(" ", "")
    assert max(map(len, text.splitlines())) <= 80


def test_a_reduction_that_the_file_gives_is_compared(tmp_path, minidist):
    (tmp_path / "job.toml").write_text('dp = 2\nsteps = 1\nreduction = "ring"')
    assert "--reduction ring adds in the ring's order" in minidist("compare", "--config", tmp_path / "job.toml").err
