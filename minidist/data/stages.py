"""Stages of `--data 'SOURCE | STAGE | STAGE'`: what happens to samples between storage and the model, in this order.

    stored samples ──▶ shuffle:B ──▶ FILE.py:decode ──▶ crop:4 ──▶ flip ──▶ batch
                       which ones    bytes to pixels    another window and side at every visit

    crop:P           an image is padded with P zeros on each side, and a window of its size is cut out at random
    flip             an image is mirrored, with probability 1/2
    FILE.py:NAME     your function of an array of samples, (rows, ...), which returns as many rows; a random one takes
                     `draw`, too: `draw(n)` returns uniform numbers in [0, 1), float64 of shape (rows, n)
    shuffle:B        an epoch's order without an array of all samples; see `data/sampler.py`

A stage sees samples as they are stored (pixels 0 to 255, T + 1 tokens), so it may decode. Its random numbers are a
function of the seed, the stage and the place of the sample in the endless list of the job: batches have the same bits
on any number of ranks, with any number of --loader-workers, and after a resume. Held-out data pass the stages that
draw nothing. Nothing is sent.

Source: padding by 4 pixels, random crop and mirror image are those of He et al., Deep residual learning, 2015
(arXiv:1512.03385), section 4.2.

Proved by: tests/data/test_stages.py
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidist.base.coordinates import Key, uniform
from minidist.base.errors import MinidistError, UsageError, nearest, quoted, reason
from minidist.base.user_file import is_user_function, load_function

Draw = Callable[[int], np.ndarray]


@dataclass(frozen=True)
class Visit:
    """Who asks for samples: the job's seed, and the place of each in the endless list, int64 of shape (rows,)."""

    seed: int
    places: np.ndarray

    def draw(self, stage: int, count: int) -> np.ndarray:
        """Return `count` uniform numbers for each sample, float64 of shape (rows, count)."""
        key = Key(self.seed, "data", name="stage", call=stage)
        return np.stack([uniform(key, place * count, count) for place in self.places.tolist()])


@dataclass(frozen=True)
class Stage:
    """A function of samples, and of `draw` if it is random. text: as it is written."""

    text: str
    function: Callable[..., Any]
    random: bool

    def __call__(self, samples: np.ndarray, draw: Draw) -> np.ndarray:
        """Return the samples after the stage. Raises UsageError when it raises, or returns another number of rows."""
        try:
            made = np.asarray(self.function(samples, draw) if self.random else self.function(samples))
        except MinidistError:
            raise
        except Exception as error:
            raise UsageError(
                f"--data: stage {quoted(self.text, marks=False)} raised {reason(error, named=True)} for samples of"
                f" shape {samples.shape} and dtype {samples.dtype}"
            ) from error
        if not made.ndim or len(made) != len(samples):
            raise UsageError(
                f"--data: stage {quoted(self.text, marks=False)} made an array of shape {made.shape} of {len(samples)}"
                " samples; return one row for each"
            )
        return made


def prepared(stages: tuple[Stage, ...], samples: np.ndarray, visit: Visit) -> np.ndarray:
    """Return samples after all stages."""
    for number, stage in enumerate(stages):
        samples = stage(samples, lambda count, number=number: visit.draw(number, count))  # type: ignore[misc]
    return samples


def with_stages(dataset: Any, texts: list[str]) -> Any:
    """Return the `Dataset` with the stages that are written behind it. Raises UsageError for one that is wrong."""
    for text in texts:
        name = text.partition(":")[0]
        if name == "shuffle":
            dataset = replace(dataset, block=_number(text, "samples of a block"))
        elif is_user_function(text):
            function = load_function(text)
            dataset = _extended(dataset, Stage(text, function, _is_random(text, function)))
        elif text == "flip" or name == "crop":
            _check_image(dataset, text)
            axes = (2, 1) if dataset.channels_last else (-1, -2)
            make = _flip(axes[0]) if text == "flip" else _crop(_number(text, "pixels of padding"), axes)
            dataset = _extended(dataset, Stage(text, make, random=True))
        else:
            raise UsageError(
                f"--data: no stage {quoted(text)}{nearest(name, ('crop', 'flip', 'shuffle'))}; stages are crop:PIXELS,"
                " flip, shuffle:BLOCK and FILE.py:FUNCTION"
            )
    return dataset


def _extended(dataset: Any, stage: Stage) -> Any:
    """Return the dataset with one more stage, which is tried on the first sample."""
    dataset = replace(dataset, stages=(*dataset.stages, stage))
    dataset.check_stages()
    return dataset


def _number(text: str, what: str) -> int:
    value = text.partition(":")[2]
    if not (value.isascii() and value.isdecimal() and 0 < int(value) < 10**9):
        raise UsageError(
            f"--data: stage {quoted(text)} needs the {what}, a number from 1; write {text.split(':')[0]}:4"
        )
    return int(value)


def _is_random(text: str, function: Callable[..., Any]) -> bool:
    """Return whether a user's function takes `draw`, its second parameter."""
    try:
        taken = len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C
        taken = 1
    if taken not in (1, 2):
        raise UsageError(
            f"--data: stage {quoted(text, marks=False)} has {taken} parameters; give it one, the samples, or two, the"
            " samples and draw"
        )
    return taken == 2


def _check_image(dataset: Any, text: str) -> None:
    if dataset.is_tokens or dataset.image is None:
        raise UsageError(f"--data: stage {text} is for images, and {dataset.name} has none; leave it out")


def _flip(width: int) -> Callable[[np.ndarray, Draw], np.ndarray]:
    def flip(samples: np.ndarray, draw: Draw) -> np.ndarray:
        mirrored = draw(1).reshape(-1, *[1] * (samples.ndim - 1)) < 0.5
        return np.where(mirrored, np.flip(samples, width), samples)

    return flip


def _crop(padding: int, axes: tuple[int, int]) -> Callable[[np.ndarray, Draw], np.ndarray]:
    def crop(samples: np.ndarray, draw: Draw) -> np.ndarray:
        # Each image's window begins at one of 2 P + 1 places in each direction.
        starts = (draw(2) * (2 * padding + 1)).astype(int)
        around, made = [(0, 0)] * samples.ndim, np.empty_like(samples)
        for axis in axes:
            around[axis] = (padding, padding)
        padded = np.pad(samples, around)
        for row, start in enumerate(starts.tolist()):
            window = [slice(None)] * (samples.ndim - 1)
            for axis, first in zip(axes, start, strict=True):
                # `window` has no axis of rows.
                window[axis if axis < 0 else axis - 1] = slice(first, first + samples.shape[axis])
            made[row] = padded[row][tuple(window)]
        return made

    return crop
