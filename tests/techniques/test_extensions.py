"""Techniques are folders: the trunk knows none by name, and a file of a user's own has the same interface."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minidist
from minidist import cli
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.start import number_of_ranks
from minidist.optim.named import OPTIMIZERS
from minidist.techniques import Extension, Moment, installed, of_job, touched
from tests.cases import each

ROOT = Path(__file__).parents[2]
SIZES = "--layers 1 --width 8 --heads 2 --context 8 --steps 3 --micro-batch 2"
JOB = ["train", "--data", "markov", *SIZES.split(), "--trace", "none"]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLE = re.search(r"<!-- small.py -->\n```python\n(.*?)```", GUIDE, re.DOTALL)[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(EXAMPLE)
    return tmp_path


def trained(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        cli.main([*JOB, *flags, "--json"])
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    return json.loads(printed.out)


@pytest.mark.parametrize("layout", ["--dp 3", "--dp 2 --tp 2", "--pp 2 --layers 2 --microbatches 2"])
def test_the_extension_of_the_guide_in_several_layouts(here, capsys, layout):
    with_it = trained(capsys, *layout.split(), "--extension", "small.py:SmallGradients,every=2,limit=1e-4")
    # The same numbers as without it, and two steps of three are counted.
    assert with_it["digest"] == trained(capsys, *layout.split())["digest"]
    assert 0 < with_it["small_gradients"] < 1
    n = with_it["ranks"]
    assert with_it["bytes_by_purpose"]["user"] == {
        "measured": 2 * 2 * (n - 1) * 16,
        "closed_form": 2 * 2 * (n - 1) * 16,
    }


@pytest.mark.parametrize(
    ("value", "flags", "words"),
    [
        ("small.py:SmallGradients", {"zero": 1, "dp": 2}, "with --zero 1 a rank has a shard .*; leave --zero out"),
        ("small.py:SmallGradients", {"pp": 2, "schedule": "pipedream"}, "all gradients of a step; leave"),
        (
            "small.py:SmallGradients,every=0",
            {},
            r"'small.py:SmallGradients': every='0': input should be greater than or equal to 1",
        ),
        (
            "small.py:SmallGradients,evry=2",
            {},
            r"unknown setting 'evry' \(did you mean 'every'\?\); its settings are: limit, every",
        ),
        (
            "small.py:SmallGradients,every",
            {},
            "--extension 'small.py:SmallGradients': the setting 'every' has no value; write every=VALUE",
        ),
        ("small.py:Rule", {}, "'small.py:Rule' is not a subclass of minidist.techniques.Extension"),
        ("small.py:Small", {}, "small.py'? has no class 'Small' .*; write FILE.py:CLASS"),
        ("small.py", {}, "'small.py' names no class; write FILE.py:CLASS"),
        ("nothing.py:SmallGradients", {}, "file 'nothing.py' does not exist; write FILE.py:CLASS"),
    ],
)
def test_what_is_wrong_with_an_extension_is_one_sentence(here, value, flags, words):
    with pytest.raises(UsageError, match=words):
        number_of_ranks(TrainConfig.make(data="markov", extension=value, **flags), None)


STATE = """
from minidist.techniques import Extension

class Counts(Extension):
    steps = 0
    def after_update(self, moment):
        self.steps += len(moment.steps)
    def state(self):
        return {"steps": self.steps}
    def load(self, state, samples):
        if state is None:
            raise ValueError(f"{samples} samples, and no count")
        self.steps = state["steps"]
    def result(self):
        return {"counted": self.steps}
    def lines(self, result):
        return [f"counted {result['counted']}"]
"""


def test_the_state_of_an_extension_goes_through_a_checkpoint(here, capsys, minidist):
    Path("counts.py").write_text(STATE)
    flags = ["--dp", "2", "--save", "run", "--extension", "counts.py:Counts"]
    assert trained(capsys, *flags)["counted"] == 3
    assert trained(capsys, *flags, "--resume", "--steps", "5", "--tp", "2")["counted"] == 5
    # Nothing is asked for a result with a parameter server, so no line shows one.
    assert "counted" not in trained(capsys, "--dp", "2", "--strategy", "ps", *flags[-2:])
    # A checkpoint of a job that did not count.
    trained(capsys, "--dp", "2", "--save", "other")
    error = minidist(
        *JOB, "--save", "other", "--resume", "--steps", "5", *flags[-2:], "--global-batch", "4", code=2
    ).err
    assert "'other/step-00000003' does not describe a job (12 samples, and no count)" in error


ARRAYS = """
import numpy as np
from minidist.techniques import Extension

class Counts(Extension):
    own_counts, common = 0, 0
    def begin(self, comm, strategy, done):
        self.rank = comm.rank
    def after_update(self, moment):
        self.own_counts += 1 + self.rank
        self.common += 1
    def of_rank(self, axis):
        return {"counts": np.array([self.own_counts])}
    def load_of_rank(self, axis, arrays):
        self.own_counts = int(arrays["counts"][0])
    def of_axis(self, axis):
        return {"common": np.array([self.common])}
    def load_of_axis(self, axis, arrays):
        self.common = int(arrays["common"][0])
    def result(self):
        return {"own": self.own_counts, "common": self.common}
    def of_all_ranks(self, results):
        return {"own": [result["own"] for result in results]}
"""


def test_what_ranks_hold_of_an_axis_goes_through_a_checkpoint_and_is_not_lost(here, capsys, minidist):
    Path("arrays.py").write_text(ARRAYS)
    flags, job = ["--extension", "arrays.py:Counts"], ["--save", "run", "--global-batch", "4", "--micro-batch", "2"]
    assert trained(capsys, *flags, *job, "--dp", "2")["own"] == [3, 6]
    resumed = ["--resume", "--from-step", "3", "--steps", "4"]
    # On as many ranks each has its own again; one rank has the sum of both.
    more = trained(capsys, *flags, *job, "--dp", "2", *resumed)
    assert (more["own"], more["common"]) == ([3 + 1, 6 + 2], 4)
    more = trained(capsys, *flags, *job, "--dp", "1", "--accumulation", "2", *resumed)
    assert (more["own"], more["common"]) == ([9 + 1], 4)
    # A job without the technique has no place for them.
    error = minidist(*JOB, *job, "--dp", "2", *resumed, code=2).err
    assert "holds arrays of a technique (local/counts/stage 0 tile 0), and this job has no place for them" in error


DERIVED = (
    STATE
    + """
class Twice(Counts):
    def after_update(self, moment):
        self.steps += 2 * len(moment.steps)
    def result(self):
        return {"twice": self.steps}
"""
)


def test_a_class_that_is_derived_from_an_extension_has_a_state_of_its_own(here, capsys):
    Path("counts.py").write_text(DERIVED)
    flags = ["--save", "run", "--extension", "counts.py:Counts,counts.py:Twice"]
    for steps, more in ((3, []), (5, ["--resume"])):
        result = trained(capsys, *flags, *more, "--steps", str(steps))
        assert (result["counted"], result["twice"]) == (steps, 2 * steps)


def test_the_key_of_a_state_is_the_class_s_name_unless_it_has_one():
    class Plain(Extension):
        pass

    class Named(Plain):
        key = "named"

    class Derived(Named):
        pass

    assert [kind.key for kind in (Plain, Named, Derived)] == ["Plain", "named", "Derived"]
    assert len({kind.key for kind in installed()}) == len(installed())


@pytest.mark.parametrize(
    ("extension", "key"),
    [
        ("counts.py:Counts,other.py:Counts", "Counts"),
        ("counts.py:Counts,counts.py:Counts", "Counts"),
        ("other.py:Ledger", "data_ledger"),
    ],
)
def test_two_extensions_with_one_key_are_refused(here, extension, key):
    Path("counts.py").write_text(STATE)
    Path("other.py").write_text(STATE + "\nclass Ledger(Extension):\n    key = 'data_ledger'\n")
    words = f"--extension '{extension.split(',')[-1]}': another extension has the key '{key}', under which"
    with pytest.raises(UsageError, match=words):
        list(of_job(TrainConfig.make(extension=extension)))


@pytest.mark.parametrize("name", ["reduces_each", "by_values"])
def test_a_method_in_the_place_of_an_attribute_is_refused(here, name):
    """A method is true whatever it returns."""
    Path("old.py").write_text(
        f"from minidist.techniques import Extension\n\nclass Old(Extension):\n    def {name}(self): return False\n"
    )
    with pytest.raises(UsageError, match=f"Old.{name} is a method, which is always true; make it an attribute"):
        list(of_job(TrainConfig.make(extension="old.py:Old")))


@each("name, near", [("after_backwards", "after_backward"), ("before_steps", "before_step"), ("observe", "observes")])
def test_a_misspelt_hook_is_refused(name, near):
    with pytest.raises(UsageError, match=rf"^Old\.{name} is no hook; did you mean {near}\?"):
        type("Old", (Extension,), {name: lambda self, strategy, step: None})
    type("Other", (Extension,), {f"_{name}": None, "share": 0.0, near: None})


NOISE = """
from minidist.techniques import Extension, Field, Record

class Noise(Extension):
    class Settings(Record):
        sigma: float = Field(0.01)
        shown: int = Field(1)
    fixed = ("sigma",)
"""


def test_a_resumed_job_has_the_fixed_settings_of_a_users_class(here, capsys, minidist):
    Path("noise.py").write_text(NOISE)
    Path("counts.py").write_text(STATE)
    resumed = [*JOB, "--save", "run", "--resume", "--steps", "5"]
    trained(capsys, "--save", "run", "--extension", "noise.py:Noise,sigma=0.01")
    error = minidist(*resumed, "--extension", "noise.py:Noise,sigma=0.02", code=2).err
    assert "was made with sigma=0.01 of the extension Noise, this job has 0.02; resume with sigma=0.01" in error
    error = minidist(*resumed, code=2).err
    assert "was made with the extension 'Noise,sigma=0.01', and this job has none of that name; resume" in error
    trained(capsys, *resumed[len(JOB) :], "--extension", "noise.py:Noise,sigma=0.01,shown=2")

    # A state without fixed settings, and a class that the first job did not have.
    trained(capsys, "--save", "other", "--extension", "counts.py:Counts")
    resumed[len(JOB) + 1] = "other"
    assert "was made with the extension 'Counts', and this job has none" in minidist(*resumed, code=2).err
    error = minidist(*resumed, "--extension", "counts.py:Counts,noise.py:Noise", code=2).err
    assert "was made without the extension Noise, which fixes sigma for a whole job; leave --extension out" in error


def test_what_is_fixed_is_a_setting(here):
    Path("noises.py").write_text(NOISE.replace('("sigma",)', '("sigmas",)'))
    with pytest.raises(UsageError, match="`fixed` names 'sigmas', which is not a setting"):
        list(of_job(TrainConfig.make(extension="noises.py:Noise")))


SETTINGS = """
from minidist.techniques import Extension, Settings

class Two(Settings):
    first_one: int = 1
    second_one: int = 2

class Has(Extension):
    Settings = Two
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (1, 2)),
        (",first_one=3", (3, 2)),
        (",first-one=3,second_one=4", (3, 4)),
        (",second-one=4, first-one =3", (3, 4)),
    ],
)
def test_settings_are_named_with_dashes_or_underscores_in_any_order(here, words, expected):
    Path("has.py").write_text(SETTINGS)
    (extension,) = of_job(TrainConfig.make(extension="has.py:Has" + words))
    assert (extension.settings.first_one, extension.settings.second_one) == expected


@pytest.mark.parametrize(
    ("steps", "place"), [(range(1), "step 0"), (range(7, 8), "step 7"), (range(4), "steps 0 to 3")]
)
def test_a_moment_names_the_steps_that_were_made(steps, place):
    assert Moment(None, steps, None).place == place


@pytest.mark.parametrize(
    ("file", "value"),
    [("a.py", "lambda: 3"), ("b.py", "{'hook': open}"), ("c.py", "[np.ones(3)]"), ("d.py", "{(1, 2): 3}")],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_a_file_is_written(here, minidist, file, value):
    Path(file).write_text("import numpy as np\n" + STATE.replace('{"steps": self.steps}', value))
    error = minidist(*JOB, "--dp", "2", "--save", "run", "--extension", f"{file}:Counts", code=2).err
    assert "rank 0: a checkpoint cannot hold " in error
    assert "the state of 'Counts' (" in error
    assert "); give it numbers, texts, and lists or dicts of them\n" in error
    assert list(Path("run").rglob("rank-*")) == []


def test_an_extension_that_changes_the_training_is_part_of_the_reference(here, minidist):
    job = ["compare", *JOB[1:-2], "--dp", "2", "--optimizer", "sgd"]
    weights = []
    for flags in ([], ["--extension", f"{ROOT}/tests/techniques/halved.py:Halved"]):
        weights.append(json.loads(minidist(*job, *flags, "--json").out)["losses"])
    assert weights[0] != weights[1]


def test_a_job_has_the_extensions_whose_settings_it_changes():
    assert list(of_job(TrainConfig.make())) == []
    job = TrainConfig.make(check_data=True, tp=2, check_layouts=True)
    assert [type(extension).__name__ for extension in of_job(job)] == ["DataCheck", "LayoutCheck"]


def test_a_job_that_uses_a_technique_changes_a_flag_of_it_or_one_of_its_switches():
    # Settings of the trunk, with values of every kind.
    trunk = [{"optimizer": name} for name in OPTIMIZERS]
    trunk += [{"precision": name} for name in ("fp64", "fp16", "bf16")]
    trunk += [{"model": name} for name in ("llama", "mlp", "cnn")]
    trunk += [{"weights": "equal"}, {"weights": "measured:2"}, {"pp": 2}, {"pp": 2, "schedule": "pipedream"}, {"tp": 2}]
    trunk += [{"zero": 3, "dp": 2}, {"cp": 2}, {"experts": 4}, {"save": "here", "resume": True}, {"evaluate_every": 1}]
    used = 0
    for settings in trunk:
        config = TrainConfig.make(**settings)
        touching = list(touched(config))
        for kind in installed():
            used += kind.used_by(config)
            assert kind in touching or not kind.used_by(config), (settings, kind)
    assert used >= 6  # of some techniques nothing is given but a setting of the trunk


def package_without(folder, *names):
    """Copy the package to `folder`, without these techniques."""
    package = folder / "minidist"
    shutil.copytree(Path(minidist.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        shutil.rmtree(package / "techniques" / name, ignore_errors=True)  # it may have been deleted for good


def ended(folder, *words):
    command = [sys.executable, "-m", "minidist", *JOB, *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, timeout=100
    )


def test_deleting_the_folders_deletes_the_techniques(tmp_path):
    package_without(tmp_path, *(kind.__module__.split(".")[-2] for kind in installed()))

    flags = [f"--{name.replace('_', '-')}" for kind in installed() for name in kind.Settings.model_fields]
    # One process runs all commands.
    program = "import runpy, sys\nfrom contextlib import suppress\n"
    layouts = ("--dp 2", "--dp 2 --zero 2 --optimizer sgd", "--dp 2 --zero 3", "--pp 2 --tp 2 --layers 2")
    cnn = "train --model cnn --width 4 --steps 1 --dp 2 --micro-batch 2 --trace none"
    jobs = [[*words, "--json"] for words in (*([*JOB, *layout.split()] for layout in layouts), cnn.split())]
    for words in (*jobs, *([*JOB, flag] for flag in flags)):
        program += f"sys.argv = {['minidist', *words]}\nwith suppress(SystemExit):\n    runpy.run_module('minidist')\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)

    # The rest trains; the flags are unknown.
    results = [json.loads("{" + text) for text in re.split(r"^\{", done.stdout, flags=re.MULTILINE)[1:]]
    assert [result["ranks"] for result in results] == [2, 2, 2, 4, 2], done.stderr
    assert re.findall(r"No such option: (--[\w-]+)", done.stderr) == flags


def test_no_sentence_names_a_flag_of_a_folder_that_is_deleted(tmp_path):
    package_without(tmp_path, "recompute", "optimizer_settings")
    refused = ended(tmp_path, "--recompute-budget", "budgets.json").stderr
    assert "--recompute-budget budgets.json chooses --recompute, and minidist/techniques has no folder" in refused
    muon = ended(tmp_path, "--optimizer", "muon")  # with the momentum that it has by default
    assert muon.returncode == 0, muon.stderr


def test_a_technique_runs_without_the_folders_of_others(tmp_path):
    package_without(tmp_path, "compression", "adaptive_batch", "muon", "lr_schedule")
    (tmp_path / "budget").write_text("1e9")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Lion"}}')
    for flags in (["--strategy", "ps"], ["--memory-budget-file", "budget"], ["--deepspeed", "ds.json"]):
        done = ended(tmp_path, "--dp", "2", *flags)
        assert done.returncode == 0, done.stderr
    refused = ended(tmp_path, "--optimizer", "muon").stderr
    assert "orthogonalises momentum, and needs a --momentum above 0; add --momentum 0.95" in refused


def test_the_example_of_the_guide_as_a_folder_of_the_package(tmp_path):
    package_without(tmp_path)
    folder = tmp_path / "minidist" / "techniques" / "small_gradients"
    folder.mkdir()
    text = re.sub(r"(?<=settings\.)(every|limit)\b", r"small_gradients_\1", EXAMPLE)
    text = text.replace(" limit:", " small_gradients_limit:")
    text = text.replace(" every: int = Field(1, ge=1,", " small_gradients_every: int = Field(0, ge=0,")
    (rule,) = re.findall(r"^ +(without_effect\(.small_.*\))$", GUIDE, flags=re.MULTILINE)
    text = text.replace("    rules = (\n", f"    rules = (\n        {rule},\n")
    text = text.replace(
        "import Extension, Field, Record, Rule\n", "import Extension, Field, Record, Rule, without_effect\n"
    )
    (folder / "extension.py").write_text(text)

    # Without __init__.py it is no package.
    lacks = ended(tmp_path, "--dp", "2")
    assert "small_gradients' has an extension.py and no __init__.py; add an empty one" in lacks.stderr
    (folder / "__init__.py").touch()
    counted = ended(tmp_path, "--dp", "2", "--small-gradients-every", "2")
    assert "of the gradients are below" in counted.stdout, counted.stderr
    assert "--small-gradients-limit 0.1 has no effect" in ended(tmp_path, "--small-gradients-limit", "0.1").stderr


def test_the_trunk_names_no_technique():
    package = Path(minidist.__file__).parent
    # The name of a class, and a setting as an attribute of a name or as a text. What runs a layout has a `strategy`,
    # a task a `clip`, a model a `dropout`, and a planned job a `prefetch`: those are the settings where they
    # are attributes of a configuration.
    planned = ("prefetch", "recompute", "clip", "top_k", "capacity_factor", "dropout", "attention_dropout")
    planned += ("synchronize_each",)
    words = [
        word
        for kind in installed()
        for word in (rf"\b{kind.__name__}", *map(r"(?<!\))[.\"']{}".format, kind.Settings.model_fields))
        if word.rpartition("]")[2] not in ("strategy", *planned)
    ] + [r"(\b(config|j)\.|[\"'])strategy", rf"\b(config|j)\.({'|'.join(planned)})"]
    trunk = [
        path
        for folder in ("job", "planning")
        for path in (package / folder).rglob("*.py")
        # What other programs call offload: DeepSpeed's files and its estimates, and what is planned for a cluster. And
        # the jobs of a sweep, which have settings of techniques where these are installed.
        if path.stem not in ("deepspeed", "deepspeed_keys", "zero_stages", "layout", "ready_commands", "layout_sweep")
    ]
    # A technique that may not be there: a rule asks for its setting, a closed form for what it gives the wrapper.
    texts = {path: re.sub(r"(optional|get)\(\"\w+\"", "", path.read_text(encoding="utf-8")) for path in trunk}
    assert len(texts) > 60
    assert [(path.name, word) for path, text in texts.items() for word in words if re.search(rf"{word}\b", text)] == []
