"""`minidist lesson`: a copy of the lessons, Jupyter on one of them, and what a course needs: notebooks, slides, a quiz.

Proved by: tests/lesson/test_instructor.py, tests/lesson/test_student.py, tests/lesson/test_slides.py,
tests/lesson/test_quiz.py
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from minidist.base.errors import UsageError, quoted_path
from minidist.base.extras import extra
from minidist.base.file_format import format_of
from minidist.base.files import writing
from minidist.commands.command import Argument, Exit, Group, Option, say

lesson = Group("Notebooks, slides and quizzes for a course.")


@lesson.command("build")
def lesson_build(
    numbers: Annotated[list[str] | None, Argument(help="numbers of lessons, such as 04; default all")] = None,
    student: Annotated[bool, Option("--student", help="without solutions, not run")] = False,
    output: Annotated[Path | None, Option("--output", "-o", help="with --student: where the notebooks go")] = None,
    solutions: Annotated[Path | None, Option(help="with --student: where the solutions go")] = None,
    seed: Annotated[
        int | None, Option(min=0, help="with --student: draws the cases of the checks; default: the date")
    ] = None,
    folder: Annotated[Path, Option(help="where the lessons are")] = Path("lessons"),
) -> None:
    """Build notebooks: with --student those for a class, else lessons/*.ipynb with their outputs."""
    from minidist.course.lesson import build

    if not student:
        for flag, value in (("--output", output), ("--solutions", solutions), ("--seed", seed)):
            if value is not None:
                raise UsageError(f"{flag} is for notebooks of students; add --student")
        code = build.main([*(numbers or ()), "--folder", str(folder)])
        if code:
            raise Exit(code)
        return
    if output is None:
        raise UsageError("--output is missing: where do the students' notebooks go?")
    if output.resolve() == folder.resolve():
        raise UsageError(f"--output {quoted_path(output)} is the folder of the lessons; choose another one")
    from minidist.course.lesson.student import solutions_of, student_notebook

    for source in build.sources(folder, numbers or ()):
        notebook = student_notebook(source, seed)
        kept = solutions_of(source) if solutions is not None else ""
        with writing("the notebooks", output, "choose another --output"):
            output.mkdir(parents=True, exist_ok=True)
            build.write(notebook, output / f"{source.stem}.ipynb")
        if solutions is not None:
            with writing("the solutions", solutions, "choose another --solutions"):
                solutions.mkdir(parents=True, exist_ok=True)
                (solutions / f"{source.stem}.py").write_text(kept, encoding="utf-8")
        say(f"written: {output / source.stem}.ipynb")


@lesson.command("open")
def lesson_open(
    number: Annotated[str, Argument(help="number of a lesson, such as 04")] = "00",
    folder: Annotated[Path, Option(help="where the lessons are")] = Path("lessons"),
) -> None:
    """Start Jupyter on a lesson; it ends with Ctrl-C."""
    from minidist.course.lesson import build

    (source,) = build.sources(folder, [number])
    extra("jupyterlab", "minidist lesson open")
    # In a container the user is often root, whom Jupyter refuses unasked.
    root = ["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    raise Exit(subprocess.call([sys.executable, "-m", "jupyterlab", str(source.with_suffix(".ipynb")), *root]))


@lesson.command("copy")
def lesson_copy(folder: Annotated[Path, Argument(help="where the lessons go")]) -> None:
    """Copy the lessons to a folder, without our solutions."""
    from minidist.course.lesson.shipped import copy

    say(f"written: {len(copy('lessons', folder))} files in {folder}")
    say(f"the first one: python {folder / '00_start_here.py'}, or open {folder / '00_start_here.ipynb'} in Jupyter")
    say(f"the programs that the lessons name: minidist example copy {folder.parent / 'mpi_examples'}")


@lesson.command("slides")
def lesson_slides(
    numbers: Annotated[list[str], Argument(help="numbers of lessons, such as 04")],
    output: Annotated[Path, Option("--output", "-o", help="the .html file to write")],
    folder: Annotated[Path, Option(help="where the lessons are")] = Path("lessons"),
) -> None:
    """Run lessons and write their text, numbers and pictures as slides: one HTML file without external requests."""
    from minidist.course.lesson.build import sources
    from minidist.course.lesson.slides import deck

    format_of(output, None, {"slides": (".html",)})
    text = deck(sources(folder, numbers))
    with writing("the slides", output, "choose another --output"):
        output.write_text(text, encoding="utf-8")
    say(f"written: {output}, {text.count('<section>')} slides")


@lesson.command("instructor")
def lesson_instructor(
    output: Annotated[Path, Option("--output", "-o", help="the folder that gets a page for each lesson")],
    numbers: Annotated[list[str] | None, Argument(help="numbers of lessons, such as 04; default all")] = None,
    folder: Annotated[Path, Option(help="where the lessons are")] = Path("lessons"),
) -> None:
    """Write pages for instructors: what is taken away, what goes wrong in the exercises, and exam questions."""
    from minidist.course.lesson.build import sources
    from minidist.course.lesson.instructor import page

    pages = {source.stem: page(source) for source in sources(folder, numbers or ())}
    with writing("the pages", output, "choose another --output"):
        output.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (output / f"{name}.md").write_text(text, encoding="utf-8")
    say(f"written: {len(pages)} pages in {output}")


@lesson.command("quiz")
def lesson_quiz(
    output: Annotated[
        Path, Option("--output", "-o", help="a .csv, .gift (Moodle), .zip (Canvas) or .xml (QTI 1.2) file")
    ],
    questions: Annotated[int, Option(min=1, max=100, help="how many")] = 27,
    seed: Annotated[int, Option(min=0, help="draws the numbers")] = 0,
) -> None:
    """Write a quiz bank whose answers are measured in traces and timings."""
    from minidist.course.lesson import quiz_files
    from minidist.course.lesson.quiz import bank

    forms = {"csv": (".csv",), "gift": (".gift",), "zip": (".zip",), "qti": (".xml",)}
    form, made, title = format_of(output, None, forms, "csv"), bank(questions, seed), f"minidist, seed {seed}"
    if form == "zip":
        content = quiz_files.as_qti_zip(made, title)
    elif form == "qti":
        content = quiz_files.as_qti(made, title).encode()
    else:
        content = (quiz_files.as_csv(made) if form == "csv" else quiz_files.as_gift(made)).encode()
    with writing("the quiz", output, "choose another --output"):
        output.write_bytes(content)
    say(f"written: {output}, {len(made)} questions")


@lesson.command("autograder")
def lesson_autograder(
    assignment: Annotated[str, Argument(help="a lesson (04), an exercise, or cs336, cse234, llmsys")],
    output: Annotated[
        Path,
        Option("--output", "-o", help="a .zip for Gradescope, autograding.json for GitHub Classroom, or a Dockerfile"),
    ],
    seed: Annotated[int, Option(min=0, help="draws some of the cases; the same for a class")] = 0,
    package: Annotated[str, Option(help="what pip installs there")] = "minidist[mpi]",
) -> None:
    """Write a grader that is ready to upload: it runs `minidist grade`."""
    from minidist.course.lesson import quiz_files
    from minidist.course.lesson.grade import exercises_of

    exercises_of(assignment)
    if output.name == "Dockerfile":
        content = quiz_files.dockerfile(assignment, seed, package).encode()
    elif format_of(output, None, {"gradescope": (".zip",), "classroom": (".json",)}) == "gradescope":
        content = quiz_files.gradescope_zip(assignment, seed, package)
    else:
        content = quiz_files.classroom_json(assignment, seed, package).encode()
    with writing("the grader", output, "choose another --output"):
        output.write_bytes(content)
    say(f"written: {output}")
