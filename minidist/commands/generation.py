"""Text from a trained language model: one token after the other, on one device, from the checkpoint of any layout.

A checkpoint is a set of named global tensors, so the layout that trained the model (ZeRO 3, a pipeline) does not matter
here. Each draw is a function of (seed, position), so the same checkpoint, prompt and seed give the same text. A new
token is computed alone, with the keys and values of those before it (`nn.KeyValueCache`), until the text is longer than
the model's context: then the window slides, and is computed anew for each token.

Proved by: tests/commands/test_generation.py
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.coordinates import Key, uniform
from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.flop_counter import FlopCounter
from minidist.core.autograd import no_grad
from minidist.job.checkpoint.resume import read_job_state
from minidist.job.checkpoint.saved_model import load_weights, named_checkpoint, saved_config, vocabulary_of
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig
from minidist.nn.kv_cache import KeyValueCache, can_cache
from minidist.techniques import of_job

BYTES = 256


class Vocabulary:
    """The part of a data set that the model depends on: how many tokens there are."""

    def __init__(self, size: int) -> None:
        self.vocab_size = size


def load_model(directory: str | Path, step: int | None = None) -> tuple[Any, TrainConfig]:
    """Return the language model of a checkpoint and the config that it was trained with.

    directory: of --save, whose latest checkpoint it is or the one of `step`; or the folder of one checkpoint in it.

    The model is without dropout. Weights in half precision are computed with in float32. Errors: UsageError for a
    classifier, and those of `Checkpoint`.
    """
    checkpoint = named_checkpoint("generate", directory, step)
    config = saved_config(checkpoint)
    if not config.is_language_model:
        kind = "a classifier" if config.is_classifier else "a model of your own"
        raise UsageError(
            f"the checkpoint {quoted_path(checkpoint.path)} holds {kind} (--model {config.model}), which generates"
            " no text here; train a gpt or llama"
        )

    # float32 holds every value of both 16-bit types exactly.
    if config.precision in ("fp16", "bf16"):
        config = config.model_copy(update={"precision": "fp32"})

    # The vocabulary is the number of rows of the embedding, so the data set itself is not needed.
    model = make_model(config, Vocabulary(vocabulary_of(checkpoint, config)))
    load_weights(checkpoint, model)
    # A job that trained for INT8 generates with integer products, as it was evaluated.
    for extension in of_job(config):
        model = extension.converted(model, read_job_state(checkpoint).scalars)
    model.eval()
    return model, config


def generate(
    model: Any,
    prompt: np.ndarray,
    count: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    kv_cache: bool = True,
) -> Iterator[int]:
    """Yield `count` tokens that continue `prompt` (1-D, at least one token), each as soon as it is known.

    temperature: the divisor of the logits; 0 takes the most probable token (the first of equal ones). top_k: the number
    of most probable tokens that are drawn from. kv_cache: keep keys and values, where the model can; the tokens are the
    same without.
    """
    for flag, value, least in (
        ("--temperature", temperature, 0),
        ("--top-k", 1 if top_k is None else top_k, 1),
        ("--tokens", count, 0),
    ):
        if value < least:
            raise UsageError(f"{flag} {value:g}: it must be at least {least}")
    if prompt.size == 0:
        raise UsageError("the prompt is empty; a model continues at least one token")

    # The model sees a sliding window of at most `context` tokens.
    text = prompt.astype(np.int64).tolist()
    cache = KeyValueCache(model, context) if kv_cache and can_cache(model) else None
    for number in range(count):
        # The logits after the last token, (vocabulary,): from the tokens that are not in the cache yet, or from all.
        if cache is not None and len(text) <= context:
            logits = np.asarray(cache.extend(text[cache.length :]), dtype=np.float64)
        else:
            with no_grad():
                logits = np.asarray(model(np.array([text[-context:]])).data[0, -1], dtype=np.float64)
        token = choose(logits, temperature, top_k, float(uniform(Key(seed, "generate"), number, 1)[0]))
        text.append(token)
        yield token


def choose(logits: np.ndarray, temperature: float, top_k: int | None, draw: float) -> int:
    """Return the token at position `draw` (in [0, 1)) of the distribution that the logits describe."""
    if temperature == 0:
        return int(np.argmax(logits))

    # The `top_k` largest logits, largest first; the stable sort leaves equal ones in order of their tokens.
    kept = np.argsort(-logits, kind="stable")[:top_k]
    scores = logits[kept] / temperature

    # Softmax without its division: exp of the differences to the maximum cannot overflow.
    weights = np.exp(scores - scores.max())
    ends = np.cumsum(weights)
    # The token in whose interval of the cumulative weights the draw falls; `min` because rounding may put the draw at
    # the very end.
    return int(kept[min(int(np.searchsorted(ends, draw * ends[-1], side="right")), kept.size - 1)])


def as_tokens(prompt: str, vocabulary: int) -> np.ndarray:
    """Return a prompt as tokens: its bytes for a byte-level model, numbers for others."""
    if vocabulary == BYTES:
        return np.frombuffer(prompt.encode(), np.uint8)
    try:
        numbers = np.array([int(word) for word in prompt.split()], np.int64)
    except ValueError:
        raise UsageError(
            f"--prompt {quoted(prompt)}: this model's tokens are numbers below {vocabulary}; write them with spaces"
            " between"
        ) from None
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < vocabulary:
        raise UsageError(f"--prompt {quoted(prompt)}: tokens of this model are numbers from 0 to {vocabulary - 1}")
    return numbers


def as_text(tokens: list[int], vocabulary: int) -> str:
    """Return bytes as text (with replacement characters where they are not UTF-8), other tokens as numbers."""
    return bytes(tokens).decode("utf-8", errors="replace") if vocabulary == BYTES else " ".join(map(str, tokens))


def run_generation(
    directory: str | Path,
    prompt: str,
    count: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    step: int | None = None,
    kv_cache: bool = True,
) -> dict[str, Any]:
    """Return what `minidist generate` prints: {prompt, text, tokens, flops}; flops: of the work for each token."""
    model, config = load_model(directory, step)
    vocabulary = model.config.vocab_size
    written = generate(
        model, as_tokens(prompt, vocabulary), count, config.context, temperature, top_k, seed, kv_cache=kv_cache
    )
    tokens: list[int] = []
    flops: list[int] = []
    with FlopCounter() as counter:
        for token in written:
            tokens.append(token)
            flops.append(sum(operations for operations, _ in counter.take()))
    return {"prompt": prompt, "text": as_text(tokens, vocabulary), "tokens": tokens, "flops": flops}
