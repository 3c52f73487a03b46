"""The README and the guide to one's own script are executed: every `minidist`, `mpiexec` and `python` command in them
runs, and what it prints is what stands there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from minidist import cli
from tests.cases import each
from tests.mpi_runner import mpiexec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "your_own_script.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"<!-- (\S+\.py) -->\n```python\n(.*?)```", GUIDE, flags=re.S))
FAILS_ON_PURPOSE = {
    "minidist run mpi_examples/1_messages/ping_pong.py --ranks 2 --deadlock": 1,
    "python hangs.py --ranks 2": 1,
    "mpiexec -n 2 python hangs.py --timeout 3": 1,
    "python swapped.py --ranks 2": 1,
}


def commands(text):
    """(command, lines that the page shows under it) from all console blocks."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def executable(command):
    """The command with this Python and this machine's mpiexec."""
    words = shlex.split(command)
    if words[0] == "mpiexec":
        return [mpiexec(), *words[1:3], *executable(" ".join(words[3:]))]
    return [sys.executable, *(["-m", "minidist"] if words[0] == "minidist" else []), *words[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of what the commands read, so that they leave nothing in the tree."""
    path = tmp_path_factory.mktemp("readme")
    for name in ("mpi_examples", "lessons"):
        shutil.copytree(ROOT / name, path / name)
    for name, text in PROGRAMS.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


PAGES = {"README": README, "guide": GUIDE, "uses": (ROOT / "docs" / "uses.md").read_text(encoding="utf-8")}


@pytest.fixture
def in_process(folder, monkeypatch, capfd):
    """in_process(command) -> (exit code, output) of `minidist ...`, without half a second for a process."""

    def run(command):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["minidist"])
        with pytest.raises(SystemExit) as end:
            cli.main(shlex.split(command)[1:])
        return end.value.code or 0, "".join(capfd.readouterr())

    return run


def started(command, folder):
    """(exit code, output) of a command in a separate process, as a reader starts it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OPENBLAS_NUM_THREADS", None)  # a reader has not set it
    answer = subprocess.run(
        executable(command), cwd=folder, capture_output=True, text=True, timeout=120, env=environment
    )
    return answer.returncode, answer.stdout + answer.stderr


# These take seconds, and another test runs each of them, with other flags or in its own process.
LONG = {
    "python axes.py --ranks 8",
    "mpiexec -n 4 minidist train --dp 4 --steps 5",
    "mpiexec -n 4 python mpi_examples/2_data_parallel/data_parallel_gpt.py",
    "minidist plan --model llama-3.1-70b --seq 8192 --ranks 32,64,128 --global-batch 512 --tokens 2e12 --price 2.5",
    "minidist plan --model llama-3.1-70b --seq 8192 --gpu h100 --ranks 256 --global-batch 512",
    "minidist report runs/mine.jsonl -o runs/mine.html",
    "python lessons/00_start_here.py",
    "mpiexec -n 4 python ranks.py",
    "minidist compare --matrix --sample 4",
    "minidist bench collectives --simulated --ranks 16 --picture runs/crossover.svg",
    "mpiexec -n 2 minidist compare --dp 2 --steps 3",
    "mpiexec -n 2 minidist compare ranks.py:train --tolerance 1e-3",
    "mpiexec -n 4 minidist order MPI_Allreduce",
    "mpiexec -n 4 python mpi_examples/1_messages/collectives.py",
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["short", "all"])
def test_the_commands_of_a_page_run_and_print_what_it_says(page, long, folder, in_process):
    """One after the other, as a reader types them: some read the trace that one before them writes."""
    wrong = []
    for command, shown in commands(PAGES[page]):
        if (command in LONG and not long) or (command.startswith("mpiexec ") and mpiexec() is None):
            continue
        # --matrix starts processes itself. The program itself is started by `mpiexec -n 4 minidist ...`.
        if command.startswith("minidist ") and "--matrix" not in command:
            code, output = in_process(command)
        else:
            code, output = started(command, folder)
        expected = FAILS_ON_PURPOSE.get(command, 0)
        missing = [line for line in shown if not is_printed(line, output.splitlines())]
        if code != expected or missing:
            wrong.append(f"$ {command}\nexit code {code}, not {expected}; without {missing}\n{output}")
    assert not wrong, "\n".join(wrong)


def is_printed(line, printed):
    """Whether a line of a page is among the printed ones; bits depend on the BLAS: of losses the shape is compared."""
    if line.startswith(("rank ", "|w|")):
        return re.sub(r"[\d.]+", "#", line) in [re.sub(r"[\d.]+", "#", p) for p in printed]
    return line == "..." or line in printed


def test_the_program_in_the_readme_is_the_example():
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert program == (ROOT / "mpi_examples" / "first_steps.py").read_text()


def norms(program, ranks, folder):
    """|w| as each rank prints it."""
    code, output = started(f"python {program} --ranks {ranks}", folder)
    assert code == 0, output
    found = [float(norm) for norm in re.findall(r"\|w\| = ([\d.]+)", output)]
    assert len(found) == ranks
    return found


@pytest.mark.parametrize("ranks", [3, pytest.param(65, marks=pytest.mark.exhaustive)])
def test_the_first_program_equals_one_device_for_any_number_of_ranks(ranks, folder):
    """Also where the ranks do not divide the 64 rows, and where one rank has none of them."""
    (alone,) = norms("mpi_examples/first_steps.py", 1, folder)
    assert norms("mpi_examples/first_steps.py", ranks, folder) == pytest.approx([alone] * ranks, rel=1e-5)


def test_the_script_of_the_guide_says_that_five_ranks_have_unlike_rows(folder):
    code, output = started("python ranks.py --ranks 5", folder)
    assert code == 1
    assert re.search(
        r"the loss of rank \d is the mean over (9|10) rows, and that of rank \d the mean over (9|10)", output
    )


def test_the_readme_says_where_it_runs_and_which_figures_depend_on_that():
    """The systems and the Python of the package's own description, and the demo's text, which is that of a Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    systems = [line.split(" :: ")[-1] for line in project["classifiers"] if line.startswith("Operating System")]
    assert systems == ["MacOS", "Linux"]
    assert "Linux, macOS, and Windows through WSL are supported; simulated ranks run wherever NumPy does" in readme
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in readme
    assert "the losses, differ a little from one patch version of Python to the next. The lines with" in readme


def test_the_files_to_read_have_the_lines_that_the_readme_says():
    rows = re.findall(r"^\| \[[\w.]+\]\(([\w./]+)\) \| (\d+) \|", README, flags=re.M)
    assert len(rows) == 6
    for file, lines in rows:
        assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) == int(lines), file
    assert len(re.findall(r"^\| \[\w+/\]", README, flags=re.M)) <= 12


@each("page", sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))
def test_every_link_of_a_page_leads_somewhere(page):
    path = ROOT / page
    text = re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8"))  # code is not a link
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert [link for link in links if not link.startswith("http") and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("page", [README, GUIDE], ids=["README", "guide"])
def test_every_world_prints_the_same_line_of_the_first_program(page):
    printed = {line for _, shown in commands(page) for line in shown if line.startswith("rank 0 of 4")}
    assert len(printed) == 1


def test_the_guide_counts_the_lines_that_differ():
    """What the script for many ranks has and the one for one device has not; indentation does not count."""
    alone = {line.strip() for line in PROGRAMS["alone.py"].splitlines()}
    numbered = re.findall(r"# (\d)", PROGRAMS["ranks.py"])
    assert numbered == ["1", "2", "3", "4", "5", "6"]
    changed = [line for line in PROGRAMS["ranks.py"].splitlines() if line.strip() not in alone]
    others = [line.split()[0] for line in changed if not re.search(r"# \d", line)]
    assert others == ['print(f"rank', "return", "if"]


def test_published_state_dicts_load_as_the_guide_says(folder):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    answer = subprocess.run(
        [sys.executable, "hugging_face.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert answer.returncode == 0, answer.stderr
    assert [float(line.split()[-1]) < 1e-6 for line in answer.stdout.splitlines()] == [True, True]
