"""Every lesson runs as a script and as a notebook, its notebook is current, and it has its ten parts."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest

from minidist.core.base.errors import UsageError
from minidist.course.lesson import build, names
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.numbers import number_of
from tests.cases import each

ROOT = Path(__file__).resolve().parents[2]
LESSONS = build.sources(ROOT / "lessons")
each_lesson = each("source", LESSONS, ids=lambda source: source.stem)


# Each takes more than 1.5 seconds, and together they take as long as four fifths of all lessons.
LONG = {"04", "05", "06c", "06d", "06e", "06f", "09", "09b", "09c", "09d", "10b", "10c", "11b", "11c", "12", "12b"}
LONG |= {"14", "14b", "14c", "16", "16b", "17", "17b", "19", "19b", "20", "20b", "20c", "22", "22b", "22c"}
LONG |= {"26", "28", "28b"}


@pytest.mark.parametrize(
    "source", [pytest.param(s, marks=[pytest.mark.exhaustive] * (number_of(s) in LONG), id=s.stem) for s in LESSONS]
)
def test_a_lesson_prints_what_its_notebook_says(source, monkeypatch):
    from tests.lesson import in_process  # every worker imports this file, and one of them runs it

    assert build.stale(source, lambda source: in_process.make(source, monkeypatch)) == ""


@each_lesson
def test_a_notebook_has_the_cells_of_its_lesson(source):
    assert build.stale(source, lambda source: nbformat.read(source.with_suffix(".ipynb"), as_version=4)) == ""


def test_a_lesson_that_prints_something_else_or_raises_is_noticed_in_this_process_too(tmp_path, monkeypatch):
    from tests.lesson import in_process

    (tmp_path / "lessons").mkdir()
    source = tmp_path / "lessons" / "92_small.py"
    source.write_text("# %%\nimport sys\nprint(1)\nprint(2, file=sys.stderr)\ndisplay('shown')\nlen\n# %%\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        in_process.make(source, monkeypatch)
    source.write_text(source.read_text().replace("1 / 0", "'end'"))
    notebook = in_process.make(source, monkeypatch)
    assert [build.printed(cell) for cell in notebook.cells] == ["1\n2\n'shown'<function len(obj, /)>", "'end'"]
    build.tidy(notebook)
    build.write(notebook, source.with_suffix(".ipynb"))
    assert build.stale(source, lambda source: in_process.make(source, monkeypatch)) == ""
    notebook.cells[0].outputs[0].text = "3\n"
    build.write(notebook, source.with_suffix(".ipynb"))
    assert "prints something else now" in build.stale(source, lambda source: in_process.make(source, monkeypatch))


# As a reader runs them: in a kernel or as a script, with jobs under mpiexec. test_readme.py does it with the first one.
@pytest.mark.exhaustive
@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.stem)
def test_the_notebook_of_a_kernel_is_current(source):
    assert build.stale(source) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", LESSONS, ids=lambda source: source.stem)
def test_a_lesson_runs_as_a_script(source, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("minidist.course.lesson.mpi_leg.mpiexec", lambda: None)  # the notebook's run has that leg
    runpy.run_path(str(source), run_name="__main__")
    # The exercises of some lessons send nothing.
    printed = capsys.readouterr().out
    solved = [find(name) for name in re.findall(r"^(\S+): correct on ", printed, re.MULTILINE)]
    assert solved
    assert ("there is no MPI here" in printed) == any(exercise.communicates for exercise in solved)


@each_lesson
def test_a_caption_draws_the_picture_of_the_lesson_and_not_another_job(source):
    """A small job is no `minidist train`, and a trace that is drawn is written by the command before."""
    text = " ".join(re.findall(r"<text [^>]*>([^<]*)</text>", source.with_suffix(".ipynb").read_text()))
    assert "minidist train" not in text
    assert "report t.jsonl --trace" not in text
    assert text.count("minidist report t.jsonl") == text.count("--trace t.jsonl; minidist report t.jsonl")


@each_lesson
def test_a_lesson_has_its_ten_parts_its_minutes_and_its_exercise(source):
    text = source.read_text()
    parts = [int(number) for number in re.findall(r"^# ## (\d+) ", text, re.MULTILINE)]
    assert parts == list(range(1, 11))
    assert re.search(r"^# \*\d+ minutes\. Before it: ", text, re.MULTILINE)
    number = number_of(source)
    checked = set(re.findall(rf'"({number}\.\w+)"', text))
    assert checked & set(names()) or f'f"{number}.' in text
    assert "mpiexec -n" in text
    assert re.search(r"picture\(|show\(\s*(draw|figure|finish|gantt|version_gantt)", text)


@each_lesson
def test_code_has_at_most_100_columns(source):
    long = [f"{n}: {line}" for n, line in enumerate(source.read_text().splitlines(), 1) if len(line) > 100]
    assert [line for line in long if not re.match(r"\d+: *#", line)] == []


# --- the reader predicts before anything gives the answer away ---

JUDGED = re.compile(
    r": (?P<answer>-?[\d,.]+(?:e[+-]?\d+)?)[^;\n]*; (?:your guess: ____|you predicted .*: (?:right|off))$", re.M
)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")


def cells_of(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells


def shown(cell):
    """What a reader sees of a cell: its text or code, what it prints, and the words of its pictures."""
    outputs = [
        o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "")
        for o in cell.get("outputs", ())
    ]
    return "\n".join([cell.source, *outputs])


def is_picture(output):
    return bool({"image/svg+xml", "image/png"} & output.get("data", {}).keys())


@each_lesson
def test_the_reader_predicts_before_anything_gives_the_answer_away(source):
    cells = cells_of(source)
    last = max(i for i, cell in enumerate(cells) if cell.cell_type == "code" and "predict(" in cell.source)
    before = cells[: last + 1]
    assert not any(is_picture(output) for cell in before for output in cell.get("outputs", ())), "a picture"

    # Every prediction is judged, by a number that was measured.
    answers = [
        m["answer"]
        for cell in cells[last:]
        for o in cell.get("outputs", ())
        for m in JUDGED.finditer(o.get("text") or o.get("data", {}).get("text/plain", ""))
    ]
    asked = sum(cell.source.count("predict(") for cell in before)
    assert len(answers) == asked

    # A number below 10 stands in any text, as a count of something else; the others must not stand there.
    text = "\n".join(shown(cell) for cell in before)
    numbers = {float(number.replace(",", "")) for number in NUMBER.findall(text)}
    telling = [float(answer.replace(",", "")) for answer in answers]
    assert not [a for a in telling if (a >= 10 or a != int(a)) and a in numbers]


def test_a_number_that_gives_an_answer_away_is_noticed():
    line = "bytes that leave rank 0: 14,000 B; your guess: ____"
    assert [m["answer"] for m in JUDGED.finditer(line)] == ["14,000"]
    assert [m["answer"] for m in JUDGED.finditer("idle: 42.8 %; you predicted 10 %: off")] == ["42.8"]
    assert NUMBER.findall("It sends 14,000 B, not 8,000; 0.25 of 16.") == ["14,000", "8,000", "0.25", "16"]


# --- pictures ---


@each_lesson
def test_every_picture_is_svg_with_a_text_and_a_title_of_its_own(source):
    titles = []
    for cell in cells_of(source):
        for output in cell.get("outputs", ()):
            if is_picture(output):
                data = output["data"]
                words = data["text/plain"]
                assert re.search(r'<svg role="img" aria-label="[^"]{10,}"', data["image/svg+xml"])
                assert f"<title>{words.split('&')[0].split('<')[0]}" in data["image/svg+xml"]
                titles.append(words)
    assert titles
    # Pictures of counterexamples are named by what failed; the lesson's own must be told apart.
    own = [title for title in titles if not re.match(r"\d+ messages?, |deadlock|memory over time", title)]
    assert len(set(own)) == len(own)


TINY = """
# %% [markdown]
# # A lesson

# %%
x = 0.1 + 0.2
print("sum", x)
print(f"{3.0049:.4f} µs, 96 B")

# %%
print("mpiexec: also correct on 3 ranks")
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course") / "lessons"
    folder.mkdir()
    (folder / "90_tiny.py").write_text(TINY)
    assert build.main(["--folder", str(folder)]) == 0
    return folder / "90_tiny.py"


def test_a_built_notebook_is_current_and_says_what_changed(tiny, capsys):
    from tests.lesson import in_process

    notebook = tiny.with_suffix(".ipynb")
    original = notebook.read_text()
    elsewhere = original.replace("sum 0.30000000000000004", "sum 0.3000000001")
    elsewhere = elsewhere.replace('"mpiexec: also correct on 3 ranks\\n"', '"mpiexec: not run\\n"')
    assert elsewhere.count("not run") == 1
    notebook.write_text(elsewhere)
    # Another machine: digits of a float, no MPI.
    with pytest.MonkeyPatch.context() as patch:
        assert build.stale(tiny, lambda source: in_process.make(source, patch)) == ""

    notebook.write_text(changed := original.replace("3.0049 µs", "3.0050 µs"))
    assert build.main(["--folder", str(tiny.parent), "--check", "90"]) == 1
    assert notebook.read_text() == changed  # --check writes nothing
    assert "build it again: python -m minidist.course.lesson.build 90" in capsys.readouterr().err
    notebook.write_text(original)


def test_an_edited_source_makes_the_notebook_stale_without_running_it(tiny):
    text = tiny.read_text()
    tiny.write_text(text.replace("# # A lesson", "# # The lesson"))
    assert "was built from another" in build.stale(tiny, lambda source: pytest.fail("ran"))
    tiny.write_text(text)


def test_two_builds_are_the_same_file(tiny):
    first = tiny.with_suffix(".ipynb").read_text()
    build.main(["--folder", str(tiny.parent)])
    assert tiny.with_suffix(".ipynb").read_text() == first


def test_a_cell_that_raises_fails_the_build(tmp_path, capsys):
    folder = tmp_path / "lessons"
    folder.mkdir()
    (folder / "91_bad.py").write_text("# %%\nraise ValueError('not announced')\n")
    assert build.main(["--folder", str(folder)]) == 1
    assert "not announced" in capsys.readouterr().err
    assert not (folder / "91_bad.ipynb").exists()


def test_an_unknown_lesson_is_named():
    with pytest.raises(UsageError, match="no lesson 99"):
        build.sources(ROOT / "lessons", ["99"])
    assert build.main(["99"]) == 2


def test_what_is_compared():
    def printed(text):
        return build.printed(
            nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])
        )

    assert printed("max 1.25e-13") == printed("max 3.5e-16")
    assert printed("loss 2.3026") == printed("loss 2.3025")
    assert printed("time 2.5 µs") != printed("time 2.6 µs")
    assert printed("1.5 MB") != printed("1.6 MB")
    assert printed("96 B") != printed("97 B")
    assert printed("63 messages") != printed("64 messages")
    assert printed("ok\n  mpiexec: also correct on 3 ranks\n") == printed("ok\n  mpiexec: not run\n") == "ok\n"


# --- the index, the glossary and the links ---

README = (ROOT / "lessons" / "README.md").read_text()
NUMBERS = [number_of(source) for source in LESSONS]
CORE = [number for number in NUMBERS if len(number) == 2]
LESSON = r"\d\d[a-z]?"


def title(source):
    return re.search(r"^# # \w+ (.*)$", source.read_text(), re.M)[1]


def head(source):
    """Return the minutes of a lesson and the lessons before it, as its first paragraph says them."""
    text = source.read_text().replace("\n# ", " ")
    minutes, before = re.search(r"\*(\d+) minutes\. Before it: ([^.;*]*)", text).groups()
    return int(minutes), re.findall(rf"\b{LESSON}\b", before)


def test_the_index_has_every_lesson_with_its_minutes_and_what_is_needed_before_it():
    rows = re.findall(rf"^\| ({LESSON}) \| \[(.*?)\]\((.*?)\) \| (\d+) \| (.*?) \| .+ \| .+ \|$", README, re.M)
    assert [row[0] for row in rows] == CORE + [number for number in NUMBERS if number not in CORE]
    for source, (_, title, link, minutes, before) in zip(LESSONS, sorted(rows), strict=True):
        assert f"# # {number_of(source)} {title}\n" in source.read_text()
        assert link == f"{source.stem}.ipynb"
        assert (int(minutes), re.findall(LESSON, before)) == head(source)


def test_the_graph_of_the_index_is_what_the_lessons_say():
    edges = re.findall(rf"^    ({LESSON}) --> ({LESSON})$", README, re.M)
    assert edges == [(before, number_of(source)) for source in LESSONS for before in head(source)[1]]


def test_the_paths_respect_what_is_needed_and_their_time():
    needed = {number_of(source): head(source) for source in LESSONS}
    paths = re.findall(r"^- \*\*(.*?)\*\* \((\d+) minutes\): ((?:\[\w+\]\(\w+\.ipynb\) ?)+):", README, re.M)
    assert [name for name, _, _ in paths] == ["An hour", "An evening", "A weekend", "The core", "A term"]
    for (_, minutes, text), most in zip(paths, (60, 180, 12 * 60, 12 * 60, 10**6), strict=True):
        path, links = re.findall(r"\[(\w+)\]", text), re.findall(r"\((.*?)\)", text)
        assert [link.partition("_")[0] for link in links] == path
        assert all((ROOT / "lessons" / link).exists() for link in links)
        for i, number in enumerate(path):
            assert set(needed[number][1]) <= set(path[:i]), number
        assert int(minutes) == sum(needed[number][0] for number in path) <= most
    assert [re.findall(r"\[(\w+)\]", paths[i][2]) for i in (-2, -1)] == [CORE, NUMBERS]


def test_next_leads_through_the_core_and_names_the_side_rooms_of_each_lesson():
    assert len(CORE) == 18
    links = {number_of(source): (f"{number_of(source)} {title(source)}", f"{source.stem}.ipynb") for source in LESSONS}
    for source, number in zip(LESSONS, NUMBERS, strict=True):
        end = source.read_text().rpartition("\n# |")[2].replace("\n# ", " ")
        order = CORE if number in CORE else NUMBERS
        following = order[order.index(number) + 1 :][:1]
        rooms = [other for other in NUMBERS if other[:2] == number and other not in CORE]
        assert re.findall(r"\[(\d[^\]]*)\]\((.*?)\)", end) == [links[other] for other in following + rooms], number
        assert ("Next: [" in end) == bool(following)
        # What a lesson builds on comes before it, and a lesson of the core builds on the core.
        before = head(source)[1]
        assert all(other < number for other in before), number
        assert number not in CORE or set(before) <= set(CORE), number


def test_every_link_of_a_lesson_leads_to_a_file():
    for source in LESSONS:
        for link in re.findall(r"\]\(([\w./]+)\)", source.read_text().replace("\n# ", "")):
            assert (ROOT / "lessons" / link).exists(), (source.name, link)


def test_every_example_is_named_in_a_lesson():
    texts = "".join(source.read_text() for source in LESSONS)
    names = [str(path.relative_to(ROOT)) for path in (ROOT / "mpi_examples").rglob("*.*") if path.suffix != ".pyc"]
    missing = [name for name in names if name not in texts]
    assert missing == []


# Words in italics that are emphasised, and not defined.
EMPHASISED = re.compile(
    r"(added|all|and|another|any|are|always|between ranks|columns|elements|global|group|half|hangs|inside|its columns"
    r"|its rows|nothing|nothing else|one|only|own window|parameters|probabilities|rarely|relative|rows|shard|sign|stage"
    r"|weights|whole|with these delays|yours?)"
)


def words_of_the_glossary():
    rows = re.findall(
        r"^\| (.+?) \| .+ \| \[(\w+)\]\((.+?)\) \|$", (ROOT / "lessons" / "glossary.md").read_text(), re.M
    )
    assert len(rows) > 60
    assert all((ROOT / "lessons" / link).exists() and link.startswith(f"{number}_") for _, number, link in rows)
    return {word.strip().lower() for words, _, _ in rows for word in words.split(",")}


def singular(word):
    return re.sub(r"(?<=[a-z]{3})s$", "", re.sub(r"'s$|(?<=ch)es$", "", word.lower()))


@each_lesson
def test_every_word_that_a_lesson_defines_is_in_the_glossary(source):
    prose = re.sub(r"\n# ?", " ", "\n".join(re.findall(r"^#(?! \||     | %%).*", source.read_text(), re.M)))
    prose = " ".join(re.sub(r"\*\*.+?\*\*|`[^`]*`", "", prose).split())
    defined = {
        word for word in re.findall(r"(?<![\w*])\*([^*\s][^*]{0,30}?)\*(?!\*)", prose) if "Before it" not in word
    }
    glossary = {singular(word) for word in words_of_the_glossary()}
    aliases = {"virtual": "virtual time", "hang": "deadlock", "batch norm": "batch norm"}
    unknown = {
        word
        for word in defined
        if not EMPHASISED.fullmatch(word)
        and singular(word) not in glossary
        and aliases.get(singular(word)) not in glossary
    }
    assert not unknown


@each_lesson
def test_a_lesson_shows_its_own_code_and_names_the_file_of_the_library(source):
    text = source.read_text()
    assert "getsource" not in text
    code = text[text.index("# ## 4 ") : text.index("# ## 5 ")]
    assert "# %%\n" in code
