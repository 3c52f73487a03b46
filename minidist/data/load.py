"""What `--data` names: a dataset that minidist generates, or a file.

Proved by: tests/data/test_loading.py
"""

import os
from collections.abc import Callable
from functools import cache

from minidist.base.errors import MinidistError, UsageError, nearest, quoted, quoted_path, reason
from minidist.base.user_file import is_user_function, load_function
from minidist.data.datasets import Dataset, SampleDataset, TokenDataset
from minidist.data.files import TOKEN_DTYPES, cifar_folder, idx_folder, npz_file, text_file, token_file
from minidist.data.generated import glyphs, markov, pydoc_text, random_tokens
from minidist.data.stages import with_stages

GENERATED: dict[str, Callable[[], Dataset]] = {"pydoc": pydoc_text, "glyphs": glyphs, "markov": markov}
MAX_VOCABULARY = 10**8


@cache
def _random(vocabulary: str) -> Dataset:
    """Return random tokens of so large a vocabulary, made once per process; UsageError for anything but a number."""
    if not (vocabulary.isascii() and vocabulary.isdecimal()) or not 2 <= int(vocabulary) <= MAX_VOCABULARY:
        raise UsageError(
            f"--data {quoted(f'random:{vocabulary}', marks=False)}: the vocabulary must be a number from 2 to"
            f" {MAX_VOCABULARY:,}; write random:50257"
        )
    dataset = random_tokens(int(vocabulary))
    dataset.tokens.flags.writeable = False
    return dataset


FILES: dict[str, Callable[[str], Dataset]] = {
    "random": _random,
    "text": text_file,
    "tokens": token_file,
    "idx": idx_folder,
    "cifar": cifar_folder,
    "npz": npz_file,
}


@cache
def _own(source: str) -> Dataset:
    """Return what a user's function returns, called once per process; UsageError for anything but a data set."""
    try:
        dataset = load_function(source)()
    except MinidistError:
        raise
    except Exception as error:
        raise UsageError(
            f"--data {quoted(source, marks=False)} raised {reason(error, named=True)}; it is called without arguments"
        ) from error
    if not isinstance(dataset, (TokenDataset, SampleDataset)):
        raise UsageError(
            f"--data {quoted(source, marks=False)} returned a value of type {type(dataset).__name__}; return a"
            " minidist.data.TokenDataset or SampleDataset"
        )
    return dataset


def load_dataset(spec: str) -> Dataset:
    """Return the dataset `pydoc`, `glyphs`, `markov`, `random:N`, `text:FILE`, `tokens:FILE`, `idx:DIR`, `cifar:DIR`,
    `npz:FILE`, or what FILE.py:FUNCTION returns; behind it may come stages, each after a bar (`data/stages.py`).

    Raises UsageError, with the value and the remedy, for an unknown name and for a file that cannot be used.
    """
    if not isinstance(spec, str):
        raise UsageError(f"load_dataset({quoted(spec)}); pass the name of a dataset, such as 'pydoc' or 'text:FILE'")
    spec, *stages = map(str.strip, spec.split("|"))
    # A user's function, a name that minidist generates, or kind:path.
    kind, colon, path = spec.partition(":")
    if is_user_function(spec):
        dataset = _own(spec)
    elif not colon and spec in GENERATED:
        dataset = _generated(spec)
    elif kind in FILES:
        if not path:
            what = "vocabulary" if kind == "random" else "file"
            raise UsageError(f"--data {quoted_path(spec, marks=False)} names no {what}; write {kind}:{_place(kind)}")
        dataset = FILES[kind](path)
    else:
        raise _no_data(spec)
    return with_stages(dataset, stages) if stages else dataset


def _no_data(spec: str) -> UsageError:
    """Return the error for what names no data."""
    kind, colon, _ = spec.partition(":")
    # A file without its kind, which its suffix tells, or a folder.
    if not colon and os.path.isdir(spec):
        return UsageError(f"--data {quoted_path(spec)} is a folder; write idx:DIR or cifar:DIR")
    suffix = os.path.splitext(spec)[1]
    if not colon and suffix and not os.path.exists(spec):
        return UsageError(f"--data {quoted_path(spec, marks=False)}: there is no file {quoted_path(spec)}")
    if not colon and os.path.isfile(spec):
        kind = "npz" if suffix == ".npz" else "tokens" if suffix in (".npy", *TOKEN_DTYPES) else "text"
        return UsageError(
            f"--data {quoted_path(spec)} is a file, but its kind is missing; write"
            f" {quoted_path(f'{kind}:{spec}', marks=False)}"
        )
    # Neither: name the nearest choice.
    choices = [*GENERATED, *(f"{name}:{_place(name)}" for name in FILES)]
    return UsageError(
        f"--data {quoted_path(spec, marks=False)}: no such data{nearest(kind, [*GENERATED, *FILES])}; one of"
        f" {', '.join(choices)}"
    )


def _place(kind: str) -> str:
    """Return what follows the colon, as help and sentences write it."""
    return {"idx": "DIR", "cifar": "DIR", "random": "N"}.get(kind, "FILE")


@cache
def _generated(name: str) -> Dataset:
    """Make the data once per process, read-only, because simulated ranks share them."""
    # A write by one rank would change the data of all others.
    dataset = GENERATED[name]()
    for array in (dataset.tokens,) if isinstance(dataset, TokenDataset) else (dataset.inputs, dataset.targets):
        array.flags.writeable = False
    return dataset
