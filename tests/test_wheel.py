"""What `pip install` gives to somebody without a clone: the wheel, built and installed outside of the repository.

uv takes packages from its cache or an index; without both these tests are skipped.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from minidist.course.lesson import solutions
from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.handout import handed_out
from tests.cases import each
from tests.test_readme import commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "website" / "package_page.md").read_text(encoding="utf-8")
NO_INDEX = ("error sending request", "Failed to fetch", "dns error", "No solution found", "was not found in the cache")
LEFT_OUT = (".*", "build", "dist", "runs", "__pycache__", "*.egg-info")


def from_index(*words, cwd=None):
    """Run uv; skip where it reaches no index and has nothing in its cache."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        pytest.skip("uv is not installed: pip install uv")
    done = subprocess.run([uv, *map(str, words)], capture_output=True, text=True, cwd=cwd)
    if done.returncode and any(text in done.stderr for text in NO_INDEX) and "minidist" not in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the tree: an old build/ would go into it."""
    source = tmp_path_factory.mktemp("source") / "minidist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    from_index("build", "--wheel", "--quiet", "--out-dir", source / "dist", source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """installed(words, folder) -> what a program of a fresh environment with minidist[mpi] did."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    from_index("venv", "--quiet", "--python", sys.executable, environment)
    from_index("pip", "install", "--quiet", "--python", environment / "bin" / "python", f"{wheel}[mpi]")
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"

    def run(words, folder):
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=variables, shell=True)

    return run


@pytest.fixture(scope="module")
def lessons(installed, tmp_path_factory):
    """What `minidist lesson copy` writes."""
    folder = tmp_path_factory.mktemp("copied")
    assert installed("minidist lesson copy course", folder).returncode == 0
    return folder / "course"


def test_the_wheel_has_types_lessons_and_examples_and_no_solution(wheel):
    files = {name: data for name, data in read(wheel).items() if ".dist-info/" not in name}
    data = {
        str(path.relative_to(ROOT)) for path in (ROOT / "minidist").rglob("*.*") if path.suffix not in (".py", ".pyc")
    }
    assert "minidist/course/lesson/par.json" in data
    assert data <= files.keys()
    assert "minidist/shipped/lessons/pictures/data_parallel_step.svg" in files
    assert all(name.startswith("minidist/") for name in files)
    assert not [name for name in files if "solutions/" in name]
    texts = "\n".join(text_of(name, data) for name, data in files.items() if "/shipped/lessons/" in name)
    ours = {name: inspect.getsource(solutions.solution(name)) for name in exercises()}
    assert [name for name, source in ours.items() if source in texts] == []
    assert 'solution("' not in texts

    # As many as the page of the package says.
    lessons = [name for name in files if re.fullmatch(r"minidist/shipped/lessons/\d\d[a-z]?_\w+\.ipynb", name)]
    examples = [name for name in files if re.fullmatch(r"minidist/shipped/mpi_examples/(\d_\w+/)?\w+\.py", name)]
    assert f"{len(lessons)} lessons as notebooks, and {len(examples)} example programs" in PAGE
    assert len(lessons) == len(list((ROOT / "lessons").glob("*.ipynb")))


def read(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def text_of(name, data):
    """The text of a file; of a notebook that of its cells and of what they print."""
    if not name.endswith(".ipynb"):
        return data.decode(errors="replace")
    cells = json.loads(data)["cells"]
    outputs = [output.get("text", "") for cell in cells for output in cell.get("outputs", ())]
    return "\n".join("".join(text) for text in [*(cell["source"] for cell in cells), *outputs])


def test_the_page_of_the_package_needs_no_file_of_the_repository(wheel):
    (metadata,) = [message_from_bytes(data) for name, data in read(wheel).items() if name.endswith("/METADATA")]
    page = metadata.get_payload(decode=True).decode()
    assert page.strip() == PAGE.strip()
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", page) + re.findall(r"(?:src|href)=[\"']([^\"']*)", page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "Typing :: Typed" in metadata.get_all("Classifier")


# Every process of a fresh environment compiles what it imports: programs run in `make exhaustive`.
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_commands_of_the_page_run_in_an_empty_folder(every, installed, tmp_path):
    for command, shown in commands(PAGE):
        if not every and not command.startswith(("minidist lesson", "minidist example")):
            continue
        done = installed(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert [line for line in shown if line not in done.stdout.splitlines()] == []
        if command == "minidist example":
            assert len(done.stdout.splitlines()) == len(handed_out(ROOT, "mpi_examples"))
    assert {path.name for path in tmp_path.iterdir()} >= {"lessons", "mpi_examples"}


@pytest.mark.exhaustive
def test_the_demo_and_a_student_s_work_need_no_clone(installed, tmp_path):
    done = installed("minidist demo --steps 2 --ranks 2", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n  yes  ") == 5
    assert "minidist lesson copy lessons" in done.stderr
    (tmp_path / "answer.py").write_text("def in_rank_order(comm, text):\n    return []\n")
    done = installed("minidist grade answer.py --assignment 00", tmp_path)
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    assert installed("minidist lesson quiz --questions 1 -o quiz.csv", tmp_path).returncode == 0


@pytest.mark.exhaustive  # tests/base/test_extras.py asks the same of commands in this environment
@each(
    ("command", "remedy"),
    [
        ("lesson build", "there are no lessons in 'lessons'; write them there with: minidist lesson copy lessons"),
        ("lesson build --student -o class", "minidist lesson copy lessons"),
        ("lesson slides 04 -o deck.html", "minidist lesson copy lessons"),
        ("lesson build 04 --folder COPY", "install it with: pip install 'minidist[lessons]'"),
        ("lesson build 04 --folder COPY --student -o class", "install it with: pip install 'minidist[lessons]'"),
        ("lesson slides 04 --folder COPY -o deck.html", "install it with: pip install 'minidist[lessons]'"),
        ("torch x.py", "install it with: pip install 'minidist[torch]'"),
        ("order torch.sum", "install it with: pip install 'minidist[torch]'"),
        ("train --device cuda", "install it with: pip install 'minidist[cuda]'"),
    ],
)
def test_without_an_extra_or_a_clone_a_command_says_what_to_do(command, remedy, installed, lessons, tmp_path):
    (tmp_path / "x.py").write_text("")
    done = installed(f"minidist {command.replace('COPY', str(lessons))}", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("minidist: ")
    assert done.stderr.count("\n") == 1
    assert remedy in done.stderr
    assert not (tmp_path / "class").exists()


@pytest.mark.exhaustive  # asks an index about every release
def test_the_lowest_versions_of_each_extra_can_be_installed_together(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for python in ("3.11", "3.13"):
        for extra in ("", *project["optional-dependencies"]):
            words = ["--python-version", python, *(["--extra", extra] if extra else []), "--only-binary", ":all:"]
            from_index(
                "pip", "compile", "--quiet", "--resolution", "lowest-direct", *words, ROOT / "pyproject.toml", "-o",
                tmp_path / "lowest.txt",
            )  # fmt: skip
