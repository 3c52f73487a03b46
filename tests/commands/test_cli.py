"""The command line: JSON that other programs read, exit codes, and one clear sentence for every wrong input."""

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from minidist import cli
from minidist.base.trace_file import read_traces
from minidist.commands import app
from minidist.core.collectives import all_reduce
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.job.train.progress import Progress
from tests.cases import each

SMALL = [
    *("--layers", "1", "--width", "8", "--heads", "2", "--context", "8"),
    *("--data", "markov", "--steps", "2", "--micro-batch", "2"),
]


@pytest.fixture
def here(capfd, monkeypatch, tmp_path):
    """Call the command line in this process, in an empty folder: a tenth of a second less than a separate process."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["minidist"])
        code = 0
        try:
            cli.main([*map(str, arguments)])
        except SystemExit as ended:
            code = ended.code or 0
        output = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, output.out, output.err)

    return call


def minidist(*arguments, cwd=None, **environment):
    """The command line in a separate process."""
    path = os.pathsep.join(p for p in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if p)
    return subprocess.run(
        [sys.executable, "-m", "minidist", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def refused(answer, *words, code=2):
    """One sentence on standard error that contains all words; nothing on standard output, no traceback."""
    assert answer.returncode == code, answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    for word in words:
        assert word in answer.stderr, answer.stderr
    return answer.stderr


def test_train_prints_one_json_object(here, tmp_path):
    answer = here("train", *SMALL, "--dp", "3", "--json", "--trace", tmp_path / "run.jsonl")
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert {"losses", "ranks", "bytes_by_purpose", "peak_bytes", "trace"} <= set(result)
    assert result["ranks"] == 3
    assert len(result["losses"]) == 2
    assert len(result["peak_bytes"]) == 3
    assert set(result["bytes_by_purpose"]) == {"startup", "gradient_reduce", "metrics"}
    for volume in result["bytes_by_purpose"].values():
        assert volume["measured"] == volume["closed_form"] > 0
    traces, header = read_traces(result["trace"])
    assert header["closed_form"] == {name: v["closed_form"] for name, v in result["bytes_by_purpose"].items()}
    assert (
        sum(t.bytes_by_purpose()["gradient_reduce"] for t in traces)
        == result["bytes_by_purpose"]["gradient_reduce"]["measured"]
    )
    assert result["messages_by_purpose"] == dict(sum((Counter(t.messages_by_purpose()) for t in traces), Counter()))


def test_many_ranks_keep_no_events_unless_they_are_asked(here, tmp_path):
    job = ["train", *SMALL, "--dp", "65", "--global-batch", "65", "--steps", "1", "--json"]
    counted = here(*job)
    assert "more than 64 ranks: bytes, messages and peaks are counted" in counted.stderr
    assert json.loads(counted.stdout)["trace"] is None
    assert json.loads(counted.stdout)["messages_by_purpose"]["gradient_reduce"] % (65 * 128) == 0
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory", "--params", "7e9"], "GB (1e9 B) a rank"),
        (["memory", "--model", "gpt2", "--accounting", "deepspeed"], "stage3"),
        (["tiles", "--tp", "2"], "(dim 0 over tp)"),
        (["staleness", "--seconds", "0.05"], "asp"),
        (["compare", *SMALL, "--dp", "2"], "equal: 2 ranks and one device"),
        (["compare", "--matrix", "--ranks", "2", "--sample", "1", "--steps", "1"], "combinations are refused"),
        (["train", *SMALL, "--dp", "2"], "closed form"),
    ],
)
def test_results_go_to_standard_output_and_progress_does_not(here, arguments, words):
    answer = here(*arguments)
    assert answer.returncode == 0, answer.stderr
    assert words in answer.stdout
    assert words not in answer.stderr


def test_without_a_trace_nothing_is_kept_and_the_volumes_are_the_same(here, tmp_path):
    kept = json.loads(here("train", *SMALL, "--dp", "2", "--json").stdout)
    answer = here("train", *SMALL, "--dp", "2", "--json", "--trace", "none")
    bare = json.loads(answer.stdout)
    assert bare["trace"] is None
    assert not (tmp_path / "none").exists()
    assert bare["bytes_by_purpose"] == kept["bytes_by_purpose"]
    assert bare["digest"] == kept["digest"]


def test_train_for_people_shows_measured_beside_closed_form(here, tmp_path):
    answer = here("train", *SMALL, "--ranks", "2")
    assert answer.returncode == 0
    assert "measured" in answer.stdout
    assert "closed form" in answer.stdout
    assert "DIFFERENT" not in answer.stdout
    assert (tmp_path / "runs" / "train.jsonl").exists()


def test_compare_prints_its_verdict(here, tmp_path):
    answer = here("compare", *SMALL, "--dp", "3", "--json")
    assert answer.returncode == 0
    verdict = json.loads(answer.stdout)
    assert {"tier", "bound", "equal", "max_difference", "first_difference"} <= set(verdict)
    assert verdict["tier"] == "ordered"
    assert verdict["equal"] is True
    assert set(verdict["max_difference"]) == {"loss", "gradients", "weights", "optimizer"}


def test_compare_keeps_what_the_loss_picture_needs(here, tmp_path):
    answer = here("compare", *SMALL, "--dp", "2", "--trace", tmp_path / "c.jsonl")
    assert answer.returncode == 0, answer.stderr
    _, header = read_traces(tmp_path / "c.jsonl")
    assert header["losses"] == header["reference_losses"]
    assert header["max_difference"] == [0.0, 0.0]
    answer = here("report", tmp_path / "c.jsonl", "--picture", "loss", "-o", tmp_path / "loss.svg")
    assert answer.returncode == 0, answer.stderr


def test_compare_in_the_float_tier_chooses_float64_and_few_steps(here):
    for flags, cut in ((["--tp", "2"], "--tp 2 cuts the sums"), (["--dp", "2", "--reduction", "ring"], "ring's order")):
        answer = here("compare", *SMALL, *flags, "--steps=2", "--json")
        assert json.loads(answer.stdout)["tier"] == "float"
        assert "compared with --precision fp64: " in answer.stderr
        assert cut in answer.stderr
    unset = [*SMALL[:10], *SMALL[12:]]  # without --steps
    answer = here("compare", *unset, "--tp", "2", "--json")
    assert json.loads(answer.stdout)["steps"] == 5
    assert "compared with --precision fp64 --steps 5: --tp 2" in answer.stderr


def test_compare_does_not_change_what_was_chosen(here):
    words = refused(here("compare", *SMALL, "--dp", "2", "--reduction", "ring", "--precision", "fp32"), "fp64")
    assert "--reduction ordered" in words
    assert "compared with" not in words
    refused(here("compare", *SMALL, "--tp", "2", "--steps=9"), "at most 5 steps")
    refused(here("compare", *SMALL, "--tp", "2", "--optimizer", "adagrad"), "tiny squares")


def test_a_difference_is_exit_code_1_and_a_name(here, monkeypatch):
    """A planted bug (the last rank's gradient is never sent) makes `compare` fail and name a tensor."""

    def skip(self, bucket):
        return all_reduce(self.comm, bucket.buffer.copy(), self.op, algorithm=self.algorithm, async_op=True)

    monkeypatch.setattr(GradientReducer, "send", skip)
    answer = here("compare", *SMALL, "--dp", "2")
    assert answer.returncode == 1
    assert "NOT equal" in answer.stdout
    assert "gradients: 'transformer" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--dp", "3", "--ranks", "4"], ["--dp 3", "4 ranks", "--dp 4"]),
        (
            ["train", "--dp", "2", "--global-batch", "8", "--micro-batch", "2", "--accumulation", "3"],
            ["8 != 2 x 3 x 2"],
        ),
        (["train", "--data", "text:/no/such/file"], ["/no/such/file"]),
        (["train", "--data", "pidoc"], ["pidoc", "pydoc"]),
        (["train", "--globl-batch", "8"], ["--globl-batch", "--global-batch"]),
        (["train", "--optimizer", "adan"], ["adan", "adam"]),
        (
            ["train", "--resume", "runs"],
            ["--resume takes no value, and 'runs' follows it", "latest checkpoint in --save"],
        ),
        (["memory", "gpt2"], ["'gpt2' has no flag before it", "--model gpt2"]),
        (["plan", "--tokens", "2T"], ["--tokens '2T'; it must be a number, such as 0.5 or 2e12"]),
        (["bench", "step", "--rounds", "1e2"], ["--rounds '1e2'; it must be a whole number in digits"]),
        (["train", "--steps", "x"], ["--steps 'x'", "whole number", "such as 4096"]),
        (["report", "no-such-trace.jsonl"], ["no-such-trace.jsonl"]),
        (["run", "no-such-script.py"], ["no-such-script.py' does not exist"]),
        (["run", "."], ["script '.' is a folder; give the path of a Python file"]),
        (["run", "--ranks", "2", "x.py"], ["'--ranks' stands before the script; write `minidist run FILE.py"]),
        (["trian"], ["trian", "train"]),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(here, arguments, words, tmp_path):
    refused(here(*arguments), *words)
    assert not (tmp_path / "runs").exists()


def test_nan_loss_names_the_step_and_a_parameter(here, tmp_path):
    answer = here("train", *SMALL, "--optimizer", "sgd", "--lr", "1e30", "--steps", "6", "--dp", "2")
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    message = answer.stderr.splitlines()[-2]  # after the progress, before the note
    assert "step" in message
    assert "parameter" in message
    assert "--lr" in message


def test_nan_advises_clip_only_where_clip_is_allowed(here):
    diverging = [*SMALL, "--optimizer", "sgd", "--lr", "1e30", "--steps", "6"]
    assert "--clip 1" in here("train", *diverging, "--dp", "2").stderr
    pipedream = ["--pp", "2", "--schedule", "pipedream", "--layers", "2"]
    for layout in (["--dp", "2", "--clip", "1"], ["--dp", "2", "--local-steps", "2"], pipedream):
        answer = here("train", *diverging, *layout)
        assert answer.returncode == 2
        assert "lower --lr" in answer.stderr
        assert "--clip" not in answer.stderr


def test_a_launcher_of_another_mpi_is_noticed():
    refused(minidist("train", *SMALL, OMPI_COMM_WORLD_SIZE="4"), "4 processes", "doctor")


def test_a_missing_mpiexec_is_one_sentence(here, monkeypatch):
    from minidist.comm import launcher

    monkeypatch.setattr(launcher.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "")
    refused(here("bench", "step", "gpt-tiny", "--ranks", "2"), "mpiexec is missing", "pip install")


def test_under_mpiexec_the_launcher_decides_the_number_of_ranks():
    refused(minidist("train", *SMALL, "--ranks", "3", PMI_SIZE="4"), "--ranks 3", "4 processes")


def test_run_passes_its_flags_to_the_script(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(
        "from minidist.comm import launch\n"
        "def main(comm):\n"
        "    comm.barrier()\n"
        "    if comm.rank == 0: print('ranks', comm.size)\n"
        "launch(main)\n"
    )
    answer = minidist("run", script, "--ranks", "3")
    assert answer.stdout == "ranks 3\n"


def test_run_of_a_script_that_starts_no_rank_is_refused(tmp_path):
    script = tmp_path / "forgotten.py"
    script.write_text("def main(comm):\n    print(comm.rank)\n")
    refused(minidist("run", script, "--ranks", "3"), "forgotten.py' has ended, and no rank has run: call launch(main)")


@pytest.mark.parametrize("picture", ["space-time", "bytes-matrix", "bytes-by-purpose", "lanes"])
def test_report_draws(here, tmp_path, picture):
    trace = tmp_path / "run.jsonl"
    assert here("train", *SMALL, "--dp", "2", "--trace", trace).returncode == 0
    answer = here("report", trace, "--picture", picture, "-o", tmp_path / "picture.svg")
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "picture.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [([], 2), (["--local-steps", 2], 2), (["--strategy", "ps"], 3), (["--strategy", "ps", "--consistency", "asp"], 3)],
)
def test_compare_says_how_far_it_is_when_it_takes_long(here, monkeypatch, flags, ranks):
    """On standard error, so that the JSON stays one object; a short comparison says nothing."""
    assert here("compare", *SMALL, "--dp", 2, *flags).stderr == ""
    monkeypatch.setattr("minidist.job.train.progress.SECONDS_BETWEEN_LINES", -1.0)
    answer = here("compare", *SMALL, "--dp", 2, *flags, "--json")
    assert json.loads(answer.stdout)["equal"] is True
    lines = {line.split("  loss")[0] for line in answer.stderr.splitlines()}
    both = {f"compare: {who}: {done}/2 steps" for who in ("one device", f"{ranks} ranks") for done in (1, 2)}
    assert lines == both


def test_a_flag_has_the_names_that_the_other_commands_give_it(here):
    """A setting that is given by another name is given: it is written without a comment, and contradicts a file."""
    canonical = ["--width", "32", "--context=16", "--chunks", "2", "--micro-batch", "4", "--lr", "0.1", "--pp", "2"]
    other = ["--hidden", "32", "--seq=16", "--vp", "2", "--batch", "4", "--learning-rate", "0.1", "--stages", "2"]
    expected = here("train", *canonical, "--print-config")
    assert expected.returncode == 0
    assert here("train", *other, "--print-config").stdout == expected.stdout
    layout = ["--heads", "4", "--layers", "2", "--gpus", "2", "--global-batch", "4", "--json"]
    planned = here("plan", "--hidden", "64", "--seq", "32", "--vp", "1", "--micro-batch", "1", *layout)
    assert planned.returncode == 0
    renamed = here("plan", "--width", "64", "--context", "32", "--chunks", "1", "--batch", "1", *layout)
    assert renamed.stdout == planned.stdout
    megatron = {"--hidden-size": 64, "--seq-length": 32, "--num-attention-heads": 4, "--num-layers": 2, "--gpus": 2}
    megatron |= {"--global-batch-size": 4, "--micro-batch-size": 1, "--vp": 1}
    assert here("plan", *(word for pair in megatron.items() for word in pair), "--json").stdout == planned.stdout
    memory = here("memory", "--model", "gpt2", "--seq", "64", "--batch", "2", "--json")
    assert here("memory", "--model", "gpt2", "--context", "64", "--micro-batch", "2", "--json").stdout == memory.stdout
    # Each name belongs to one thing, and the flags of a script stay as they are.
    names = [name for names in app.SYNONYMS for name in names]
    assert len(names) == len(set(names))


def test_the_list_of_commands_says_what_each_of_them_says():
    commands = {name: app.loaded(name).__doc__.splitlines()[0] for name in app.COMMANDS}
    assert app.abouts() == commands | {name: app.loaded(name).help for name in app.GROUPS}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], [], ["trian"]])
def test_what_needs_no_command_imports_none(words):
    """Nor NumPy, which takes several times as long as the list of commands; Typer only to say what is wrong."""
    code = (
        "import sys\n"
        f"sys.argv[1:] = {words}\n"
        "from minidist import cli\n"
        "try:\n"
        "    cli.main()\n"
        "except SystemExit:\n"
        "    named = [name for name in sys.modules if name.startswith('minidist.commands.')]\n"
        "    print(*sorted(name.rpartition('.')[2] for name in named), *({'numpy', 'typer'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wrong = "typer_help typer" if words in ([], ["trian"]) else ""
    assert done.stdout.splitlines()[-1].split() == f"app command listing {wrong}".split()


# What Typer brings, and what files of settings, packed data, workers, checkpoints and programs need.
NOT_LOADED = {"typer", "rich", "pydantic", "argparse", "gzip", "queue", "socket", "statistics", "tomllib", "zipfile"}


@each("words, most", [("train --steps 1 --dp 2 --trace none", 294), ("schedule 1f1b --stages 4 --microbatches 8", 86)])
def test_a_command_loads_little_that_it_does_not_use(words, most, tmp_path):
    code = f"import sys; sys.argv[1:] = {words.split()}; from minidist import cli\n"
    code += "try: cli.main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = done.stdout.splitlines()[-1].split()
    assert NOT_LOADED & set(loaded) == set()
    assert len([name for name in loaded if name.startswith("minidist")]) <= most


def test_the_progress_of_a_long_job_is_few_lines(monkeypatch, capsys):
    seconds = iter(range(10_000))
    monkeypatch.setattr("minidist.job.train.progress.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    with Progress(600, interactive=False) as progress:
        for step in range(600):
            progress(SimpleNamespace(step=step, loss=1.0))
    done = [int(line.split()[1].partition("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert done[:6] == [1, 3, 8, 17, 34, 67]
    assert len(done) == 23  # one more every 33 seconds, and the last step
    assert done[-1] == 600


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["memory --params 7e9", "train --help", "--version"])
def test_standard_output_on_a_full_disk_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "minidist", *arguments.split()], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "minidist: standard output cannot be written: No space left on device; make room where it goes"
    ]


def test_a_reader_that_has_read_enough_is_no_error():
    command = f"{sys.executable} -m minidist schedule 1f1b --stages 16 --microbatches 40 --json | head -n 1"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert answer.stderr == ""


def test_the_picture_of_the_demo_is_of_its_last_step(here, monkeypatch):
    """As its sentence says, also where all steps would fit into the picture."""
    here("train", *SMALL, "--dp", 2, "--trace", "t.jsonl")
    monkeypatch.setattr("minidist.commands.demo_run.run_demo", lambda *_: ({"trace": "t.jsonl", "passed": True}, []))
    answer = here("demo", "--steps", 2, "--folder", ".")
    assert answer.returncode == 0
    assert "its last step, a line for each rank" in answer.stderr
    with open("space-time.svg", encoding="utf-8") as picture:
        assert "--steps 1:2" in picture.read()
