"""Show that a change only moves functions: `python -m tests.golden.moved [COMMIT]` (default: HEAD).

A function is its syntax tree without positions and without the module names of its imports. A pure move leaves the
multiset of all functions of the package as it was; what is printed appeared or disappeared, so it was edited too.
"""

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path


def functions(sources):
    """Count the functions and methods of (path, text) pairs, as (name, tree without positions)."""
    found = Counter()
    for path, text in sources:
        for node in ast.walk(ast.parse(text, path)):
            # Only where a name comes from may change: `from minidist.a import f` is then `from minidist.b import f`.
            if isinstance(node, ast.ImportFrom):
                node.module, node.names = "", sorted(node.names, key=lambda alias: alias.name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name, ast.dump(node)] += 1
    return found


def at(commit):
    """Yield the path and text of each file of the package at a commit."""
    archive = subprocess.run(["git", "archive", commit, "minidist"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.name.endswith(".py"):
                yield member.name, files.extractfile(member).read().decode("utf-8")


def main():
    """Compare the working tree with a commit; the exit code is 1 where functions differ."""
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    before = functions(at(commit))
    now = functions((str(path), path.read_text(encoding="utf-8")) for path in Path("minidist").rglob("*.py"))
    gone, new = before - now, now - before
    for sign, changed in (("-", gone), ("+", new)):
        for name, _ in sorted(changed):
            print(sign, name)
    print(f"{before.total()} functions before, {now.total()} now; {gone.total()} gone, {new.total()} new")
    sys.exit(bool(gone or new))


if __name__ == "__main__":
    main()
