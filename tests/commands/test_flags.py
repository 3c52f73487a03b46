"""Every flag and every setting, found by enumeration: what is out of range or endless is one short sentence."""

import inspect
import json
from pathlib import Path
from typing import get_args

import pytest

import minidist.commands.app as program
from minidist.base.limits import MAX_VALUE, MIN_VALUE
from minidist.comm.sim.links import LinkModel
from minidist.commands.flags import above_zero, within_limits
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from tests.cases import each

OUT_OF_RANGE = ("nan", "inf", "-inf", "-1", "-1e-308", "1e-308", "1e308", "1e400")


def commands():
    """(words, function) of every command."""
    for name in program.COMMANDS:
        yield [name], program.loaded(name)
    for name in program.GROUPS:
        for command, function in program.loaded(name).commands.items():
            yield [name, command], function


def options(function):
    """(name, type, Flag) of each flag of a command."""
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *rest = get_args(parameter.annotation) or (parameter.annotation,)
        if rest:
            yield name, kind, rest[0]


# --- help -------------------------------------------------------------------------------------------------------------


@each("words", [[], *([name] for name in program.GROUPS), *(words for words, _ in commands())], ids=" ".join, sampled=6)
@each("flag", ["--help", "-h"])
def test_the_help_shows_no_type_beside_a_flag_that_takes_no_value(words, flag, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        program.main([*words, flag])
    said = capsys.readouterr().out
    assert not end.value.code
    assert "--help" in said
    assert "bool" not in said.lower().replace("boolean", "")


# --- floats -----------------------------------------------------------------------------------------------------------


def takes_float(kind):
    return kind is float or float in get_args(kind)


def test_every_flag_that_takes_a_float_has_the_check():
    """Those of a job are checked by TrainConfig, whether they come from flags, --set, files or Python."""
    own = [
        (" ".join(words), name, info.callback)
        for words, function in commands()
        for name, kind, info in options(function)
        if takes_float(kind) and name not in TrainConfig.model_fields
    ]
    assert len(own) >= 11
    assert [(words, name) for words, name, callback in own if callback not in (within_limits, above_zero)] == []


@each("text", OUT_OF_RANGE)
def test_a_float_out_of_range_is_one_sentence(text, minidist):
    said = minidist("bench", "collectives", "--simulated", "--ranks", "2", f"--beta={text}", code=2).err
    assert said.startswith(f"minidist: --beta is {float(text):g}; it must be 0, or a number from 1e-30 to 1e+30")
    assert said.count("\n") == 1


@each("text", OUT_OF_RANGE)
def test_every_float_of_a_job_has_a_range(text):
    floats = [name for name, info in TrainConfig.model_fields.items() if takes_float(info.annotation)]
    assert len(floats) >= 12
    for name in floats:
        with pytest.raises(UsageError) as error:
            TrainConfig.make(**{name: float(text)})
        assert str(error.value).startswith(f"--{name.replace('_', '-')} {float(text)}: input should be ")
        if "0, or" in str(error.value):
            TrainConfig.make(**{name: 0.0})  # what the sentence offers
    with pytest.raises(UsageError, match="--betas"):
        TrainConfig.make(betas=f"0.9,{text}")


@each(
    ("words", "sentence"),
    [
        ("hang", "Missing argument 'folder'. Give it: the folder with one dump per rank, such as nccl_trace_rank_0"),
        ("train --num-layers", "Option '--layers' requires an argument. Give it: blocks of the model; hidden"),
        ("lesson copy", "Missing argument 'folder'. Give it: where the lessons go."),
        ("train --nope", "No such option: --nope"),
    ],
)
def test_what_is_missing_is_said_with_what_to_give(words, sentence, minidist):
    assert sentence in minidist(*words.split(), code=2).err


RANGE = "it must be a number from 1e-30 to 1e+30"


@each(
    ("words", "sentence"),
    [
        ("partition none.json --machines 2 --bandwidth -1", f"--bandwidth is -1; {RANGE}"),
        ("partition none.json --machines 2 --memory-limit 0", f"--memory-limit is 0; {RANGE}"),
        ("staleness --slow 0", f"--slow is 0; {RANGE}"),
        ("train --memory-budget 0", "--memory-budget 0.0: input should be greater than 0"),
        ("train --weights 1,inf --dp 2", f"--weights '1,inf': that of data-parallel rank 1 is inf; {RANGE}"),
        ("data --weights 1e-40,1 --dp 2", f"--weights '1e-40,1': that of data-parallel rank 0 is 1e-40; {RANGE}"),
    ],
)
def test_a_sentence_offers_only_what_is_allowed(words, sentence, minidist):
    assert minidist(*words.split(), code=2).err == f"minidist: {sentence}\n"


@pytest.mark.parametrize("name", ["alpha", "beta", "flops", "memory_bandwidth"])
def test_a_link_model_has_the_same_range(name):
    for text in OUT_OF_RANGE:
        if not (text in ("inf", "1e400") and name in ("flops", "memory_bandwidth")):  # computing may cost nothing
            with pytest.raises(UsageError, match=f"link model: {name} is"):
                LinkModel(**{name: float(text)})
    for number in (MIN_VALUE, MAX_VALUE):
        LinkModel(**{name: number})


# --- long texts -------------------------------------------------------------------------------------------------------

LONG = "x" * 10_000
MODEL = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "4", "--steps", "1"]
# What a command needs in addition to the flag, so that it is right without it, and quick.
NEEDED = {
    "train": [*MODEL, "--trace", "t.jsonl"],
    "compare": MODEL,
    "data": MODEL,
    "profile": [*MODEL, "--rounds", "1"],
    "explain": ["ds.json", *MODEL],
    "memory": ["--model", "gpt2"],
    "check-collective": ["none.py:f"],
    "check-plan": ["none.json"],
    "order": ["ring"],
    "hang": ["none"],
    "torch": ["none.py"],
    "mpi": ["none.py"],
    "tiles": ["--tp", "2"],
    "generate": ["none"],
    "grade": ["none.py", "--assignment", "04"],
    "staleness": ["asp", "--seconds", "0.01"],
    "partition": ["none.json", "--machines", "2"],
    "schedule": ["1f1b", "--stages", "2", "--microbatches", "2"],
    "report": ["none.jsonl"],
    "lesson build": ["99"],
    "lesson quiz": ["--output", "none.txt"],
    "lesson slides": ["99", "--output", "none.html"],
    "bench collectives": ["--simulated", "--ranks", "2", "--sizes", "4"],
}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Run the program; return what it says on standard error, without progress."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')

    def run(*words):
        with pytest.raises(SystemExit) as end:
            program.main(list(words))
        text = capsys.readouterr().err
        text = "\n".join(line for line in text.splitlines() if not line.startswith("training: "))
        assert "Traceback" not in text
        assert end.value.code in (0, 1, 2)
        return text

    return run


VALUES = [
    (" ".join(words), name, info)
    for words, function in commands()
    for name, kind, info in options(function)
    if kind is not bool and (words == ["train"] or name not in TrainConfig.model_fields)
]
FORMS = (LONG, f"{LONG}:{LONG}", f"{LONG}.py:{LONG}", f"text:{LONG}", f"{LONG}.json", f"{LONG}.csv", f"{LONG}=1")


def with_value(command, name, info, value):
    """The words of a command that is right but for one flag or argument."""
    needed = NEEDED.get(command, [])
    if info.is_word:
        return [*command.split(), value, *needed[bool(needed) and not needed[0].startswith("--") :]]
    flag = next((text for text in info.names if text.startswith("--")), f"--{name.replace('_', '-')}")
    return [*command.split(), *needed, flag, value]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("command", sorted({command for command, *_ in VALUES}))
def test_a_text_of_ten_thousand_characters_is_not_repeated(command, said):
    for name, info in [rest for first, *rest in VALUES if first == command]:
        for value in FORMS:
            text = said(*with_value(command, name, info, value))
            assert LONG[:100] not in text, (name, value[-10:], text[:300])
            assert len(text) < 1_000, (name, value[-10:], text[:300])


def test_an_unknown_flag_or_command_of_ten_thousand_characters(said):
    for words in ([LONG], [f"--{LONG}"], ["train", f"--{LONG}"], ["train", f"--{LONG}=1"], ["doctor", LONG]):
        text = said(*words)
        assert text
        assert LONG[:100] not in text
        assert len(text) < 1_000


def test_a_long_text_in_a_file_is_not_repeated(said, tmp_path):
    """As a key, as a value of every setting, and as a cell of a plan."""
    jobs = [{name: LONG} for name in (*TrainConfig.model_fields, LONG)]
    deepspeed = json.loads((Path(__file__).parents[2] / "mpi_examples" / "ds_config.json").read_text())
    sections = [key for key, value in deepspeed.items() if isinstance(value, dict)]
    translated = [
        *({**deepspeed, key: LONG} for key in (*deepspeed, LONG)),
        *({**deepspeed, key: {**deepspeed[key], name: LONG}} for key in sections for name in (*deepspeed[key], LONG)),
    ]
    for flag, contents in (("--config", jobs), ("--deepspeed", translated)):
        for content in contents:
            (tmp_path / "a.json").write_text(json.dumps(content))
            text = said("train", *NEEDED["train"], flag, "a.json")
            assert LONG[:100] not in text, text[:300]
            assert len(text) < 1_000, text[:300]
    for cell in (LONG, f"0F{'1' * 10_000}", f"{'1' * 10_000}F0"):
        (tmp_path / "a.csv").write_text(f"0F0,{cell},0B0")
        text = said("schedule", "a.csv")
        assert text
        assert len(text) < 600
