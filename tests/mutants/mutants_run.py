"""Mutation testing: a bug is planted in a copy of the package, and the test that is named for it must fail.

`make mutants` runs every mutant of `mutants.toml` and prints killed or survived; a survivor ends it with exit code 1.

    python -m tests.mutants.mutants_run                  all of them, two at a time
    python -m tests.mutants.mutants_run ring one_f       those with one of these words in file, reason or test
    python -m tests.mutants.mutants_run --table          the table of docs/guarantees.md

The museum patches objects of the running program; here the source text is replaced, so that every line can be broken.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("minidist", "tests", "mpi_examples", "docs", "lessons", "pyproject.toml", "CONTRIBUTING.md", "README.md")
PROCESSES, TIMEOUT_S = 2, 300


@dataclass(frozen=True)
class Mutant:
    """A planted bug. file: below minidist/. find: its source text, found exactly once. test: a pytest node id."""

    file: str
    find: str
    replace: str
    test: str
    why: str

    @property
    def path(self) -> Path:
        """The file that is changed, from the root."""
        return Path("minidist") / self.file

    def planted(self, source: str) -> str:
        """Return the source with the bug in it; ValueError unless the text is found exactly once."""
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"{self.path}: {self.find!r} is found {count} times; a mutant needs exactly one place")
        return source.replace(self.find, self.replace)


def mutants(path: Path = LIST) -> list[Mutant]:
    """Return the list."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


class Copy:
    """A copy of the project in which one mutant after the other is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
            else:
                shutil.copy(source, folder / name)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Change the file in the block. Its compiled form goes too: it is recognized by time and size alone."""
        path = self.folder / mutant.path
        source = path.read_text(encoding="utf-8")
        try:
            path.write_text(mutant.planted(source), encoding="utf-8")
            self._forget(path)
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            self._forget(path)

    def _forget(self, path: Path) -> None:
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run pytest in the copy and return its exit code (124: it ran too long) and its output."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OPENBLAS_NUM_THREADS": "1"}
        options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "--hypothesis-profile=mutants"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        try:
            ended = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return 124, f"no end after {TIMEOUT_S} s"
        return ended.returncode, ended.stdout + ended.stderr


def outcome(code: int) -> str:
    """Return what pytest's exit code means. Only a test that failed has found the bug: an error in a test is none."""
    return {0: "survived", 1: "killed", 124: "ran too long"}.get(code, f"broken (pytest's exit code {code})")


def run_all(chosen: Sequence[Mutant], processes: int = PROCESSES) -> dict[Mutant, str]:
    """Plant and test every mutant, `processes` at a time, and print each."""
    results: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="minidist-mutants-") as folder:
        copies: Queue[Copy] = Queue()
        for number in range(processes):
            (Path(folder) / str(number)).mkdir()
            copies.put(Copy(Path(folder) / str(number)))

        def run(mutant: Mutant) -> None:
            copy, began = copies.get(), time.monotonic()
            try:
                with copy.planted(mutant):
                    code, output = copy.run(mutant.test)
            finally:
                copies.put(copy)
            results[mutant] = outcome(code)
            print(f"{results[mutant]:10} {time.monotonic() - began:5.1f} s  {mutant.file}: {mutant.why}", flush=True)
            if results[mutant] != "killed":
                print("\n".join(output.splitlines()[-15:]), flush=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(run, chosen))
    return {mutant: results[mutant] for mutant in chosen}


def table(everything: Sequence[Mutant]) -> str:
    """Return the table of docs/guarantees.md: a row per package, and how many tests find its bugs."""
    packages = Counter(mutant.file.split("/")[0] for mutant in everything)
    rows = ["| package | planted bugs | for example | found by |", "|---|---|---|---|"]
    for package, count in sorted(packages.items()):
        own = [mutant for mutant in everything if mutant.file.split("/")[0] == package]
        files = sorted({mutant.test.partition("::")[0] for mutant in own})
        links = ", ".join(f"[{Path(file).name}](../{file})" for file in files[:3]) + (", ..." if len(files) > 3 else "")
        rows.append(f"| `{package}` | {count} | {own[0].why} | {links} |")
    return "\n".join([*rows, f"| all | {len(everything)} | | {len({mutant.test for mutant in everything})} tests |"])


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that are asked for, or print the table."""
    everything = mutants()
    if "--table" in arguments:
        print(table(everything))
        return 0
    chosen = [m for m in everything if not arguments or any(word in f"{m.file} {m.why} {m.test}" for word in arguments)]
    results = run_all(chosen)
    counts = Counter(results.values())
    print(f"{len(chosen)} mutants: " + ", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    return 0 if chosen and set(counts) == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
