"""Runs the cells of a lesson in this process, where `make lessons` starts a kernel for each lesson.

Starting a kernel and importing the package anew takes longer than most lessons. Every cell is compiled and shown by the
IPython that a kernel runs. Jobs under mpiexec are left out, whose lines are not compared.
"""

import sys
import types
from collections import defaultdict

import jupytext
from ipykernel.compiler import XCachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbformat import NotebookNode
from traitlets.config import Config

from minidist.course.lesson import build, runner, solutions


def make(source, monkeypatch):
    """Return the notebook of a lesson with its outputs, as `build.make` does. Raises what a cell raises."""
    notebook, outputs = jupytext.read(source), []
    monkeypatch.chdir(source.resolve().parents[1])
    monkeypatch.setenv(runner.SEED, "0")
    monkeypatch.setattr(solutions, "_session", defaultdict(set))  # where nobody has tried an exercise
    monkeypatch.setattr(solutions, "kept", lambda what: solutions._session[what])
    monkeypatch.setattr("minidist.course.lesson.mpi_leg.mpiexec", lambda: None)
    monkeypatch.setattr("builtins.input", nobody)
    for picture in ("svg", "png"):  # drawing them takes a third of the time, and they are not compared
        monkeypatch.setattr(f"minidist.report.notebook.{picture}", lambda *figure: "")
    shell = shell_that_adds_to(outputs)
    monkeypatch.setitem(sys.modules, "__main__", shell.user_module)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(name, outputs))
    try:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                outputs.clear()
                shell.run_cell(cell.source, store_history=True).raise_error()
                cell.outputs = build.merged(outputs)
    finally:
        InteractiveShell.clear_instance()
    return notebook


def nobody(question):
    """Answer as a kernel does that nobody sits at."""
    raise NotImplementedError(question)


class Stream:
    """A file whose texts become outputs of the cell that runs."""

    encoding = "utf-8"

    def __init__(self, name, outputs):
        self.name, self.outputs = name, outputs

    def write(self, text):
        self.outputs.append(NotebookNode(output_type="stream", name=self.name, text=text))
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False


def shell_that_adds_to(outputs):
    """Return an IPython that writes no history, and adds to the list what a cell shows."""

    class Hook(DisplayHook):
        def write_format_data(self, data, metadata=None):
            outputs.append(NotebookNode(output_type="execute_result", data=data))

    class Publisher(DisplayPublisher):
        def publish(self, data, *arguments, **options):
            outputs.append(NotebookNode(output_type="display_data", data=data))

    InteractiveShell.clear_instance()
    return InteractiveShell.instance(
        config=Config(HistoryManager={"enabled": False}, InteractiveShell={"cache_size": 0}),
        user_module=types.ModuleType("__main__"),
        displayhook_class=Hook,
        display_pub_class=Publisher,
        compiler_class=XCachingCompiler,  # it gives a cell the file name by which a report knows its number
    )
