"""The gradients of another framework compared with ours: of the same weights and the same batch, tensor by tensor.

    [1] the dump's weights go into a model of minidist, and its batch through it: our loss, activations and gradients
    [2] the tolerance is what rounding does: our run in the dump's dtype, compared with our run in float64
    [3] tensors are compared in the order in which they are computed: activations, then gradients from the last layer
    [4] the first that differs is named, with what describes the difference (job/equality/difference_patterns.py)

With a second dump in the place of our run, [1] and [2] are left out, and the tolerance must be given.

Proved by: tests/equality/test_dump_comparison.py
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.half import named_dtype
from minidist.core.autograd import Tensor
from minidist.core.nn import GPT, GPTConfig
from minidist.debug.dumps.dump import Dump
from minidist.debug.dumps.dump_names import Heads, Named, to_ours
from minidist.job.equality.difference_patterns import Context, distance, explain, not_finite
from minidist.job.equality.rounding import MARGIN
from minidist.nn import Llama, LlamaConfig

LEAST = 1e-6  # of a tolerance
SMALL = 1e-5  # a gradient with this share of the largest norm is zero but for rounding
EMBEDDINGS = {"gpt": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
BLOCKS = {"gpt": "transformer.h.{}", "llama": "model.layers.{}"}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs. distance, tolerance: relative to the norm of ours. patterns: sentences."""

    name: str
    distance: float
    tolerance: float
    patterns: list[str]

    def sentence(self) -> str:
        """Return the tensor with its patterns in one line."""
        return f"{self.name} is {'; or '.join(self.patterns)}"


@dataclass(frozen=True)
class DumpComparison:
    """What was found. differences: in the order in which the tensors are computed."""

    compared: int
    differences: list[Difference]
    unequal: dict[str, str]
    missing: list[str]
    largest: float  # distance of a tensor that is equal
    tolerance: float  # the largest of a tensor
    loss: tuple[float, float] | None = None  # theirs and ours
    order: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all tensors, replicas and losses are equal within their tolerances."""
        return not self.differences and not self.unequal and not self.loss_differs

    @property
    def loss_differs(self) -> str:
        """Why the two losses are not equal; empty where they are, and where there are none."""
        if self.loss is None:
            return ""
        theirs, ours = self.loss
        if not isfinite(theirs):
            return "a loss that is not finite is equal to none"
        # A wrong divisor of the printed loss alone changes no gradient.
        gap = abs(theirs - ours)
        return f"they differ by {gap:.3g}" if gap > self.tolerance * max(abs(theirs), abs(ours)) else ""

    def as_dict(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {
            "equal": self.equal,
            "compared": self.compared,
            "first_difference": self.differences[0].name if self.differences else None,
            "differences": [vars(difference) for difference in self.differences],
            "unequal_replicas": self.unequal,
            "not_in_theirs": self.missing,
            "largest_distance_of_equal_tensors": self.largest,
            "tolerance": self.tolerance,
            "loss": self.loss,
        }

    def text(self, most: int = 12) -> str:
        """Return the report: the first difference, then the others."""
        lines = [f"replicas differ: {name}: {why}" for name, why in self.unequal.items()]
        if self.loss:
            why = self.loss_differs
            lines.append(f"loss: theirs {self.loss[0]:.8g}, ours {self.loss[1]:.8g}" + (f"; {why}" if why else ""))
        if self.missing:
            lines.append(f"{len(self.missing)} tensors of ours are not in the dump, such as {self.missing[0]}")
        if self.equal:
            lines.append(
                f"equal: {self.compared} tensors; largest distance {self.largest:.2g}, tolerance {self.tolerance:.2g}"
            )
        elif self.differences:
            first = self.differences[0]
            lines.append(f"{len(self.differences)} of {self.compared} tensors differ")
            lines.append(f"first: {first.sentence()}")
            lines.append(f"  distance {first.distance:.3g}, tolerance {first.tolerance:.2g}")
            lines += [f"then: {other.sentence()}" for other in self.differences[1:most]]
            if len(self.differences) > most:
                lines.append(f"and {len(self.differences) - most} more")
        return "\n".join(lines)


def compare_with_ours(dump: Dump, model: str, heads: int, kv_heads: int | None) -> DumpComparison:
    """Compare a dump with our run of its weights and its batch. heads, kv_heads: of the model, as shapes do not say."""
    shared = Heads(heads, kv_heads or heads)
    weights = to_ours(dump.names, model, dump.of_kind("weights"), shared)
    batch = dump.of_kind("batch")
    if not weights or "tokens" not in batch:
        what = "weights" if not weights else "batch/tokens"
        raise UsageError(
            f"{quoted_path(dump.path)} has no {what}, which our run needs; dump it, or give --against OTHER_DIR"
        )
    inputs, targets = _samples(batch, "")

    # Ours in float64, and once more in the dtype of the dump: their distance is what rounding does.
    kinds = {name.split("/")[0] for name in dump.tensors} & {"activations", "gradients"}
    stored = next((d for name, d in dump.dtypes.items() if name.startswith(("gradients/", "activations/"))), "float32")
    ours = _run(model, shared, weights, inputs, targets, "float64")
    rounded = _run(model, shared, weights, inputs, targets, "float32" if stored == "float64" else stored)
    theirs = {
        f"{kind}/{name}": value
        for kind in sorted(kinds)
        for name, value in to_ours(dump.names, model, dump.of_kind(kind), shared).items()
    }
    tolerances = _tolerances(ours, rounded, dump.path)

    # What patterns need: the gradient of each row, and of the batch before.
    rows = [_run(model, shared, weights, inputs[r : r + 1], targets[r : r + 1], "float64") for r in range(len(inputs))]
    before = (
        _run(model, shared, weights, *_samples(batch, "previous_"), "float64") if "previous_tokens" in batch else {}
    )

    def context(name: str) -> Context:
        of_rows = [row[name] / len(rows) for row in rows] if name.startswith("gradients/") else []
        return Context(tolerances[name], dump.mesh, of_rows, before.get(name), *_heads_of(name, shared))

    loss = None
    if "loss" in batch:
        if batch["loss"].size != 1:
            raise UsageError(
                f"{quoted_path(dump.path)}: batch/loss has the shape {batch['loss'].shape}; it is one number, the mean"
                " over all tokens of the batch"
            )
        loss = batch["loss"].item(), ours["activations/loss"].item()
    return _compared(theirs, ours, tolerances, context, dump.unequal, loss)


def compare_dumps(theirs: Dump, against: Dump, model: str, heads: Heads, tolerance: float) -> DumpComparison:
    """Compare two dumps; the second one is taken for right."""
    mine, other = (
        {
            f"{kind}/{name}": value
            for kind in ("activations", "gradients", "weights")
            for name, value in to_ours(dump.names, model, dump.of_kind(kind), heads).items()
        }
        for dump in (against, theirs)
    )

    def context(name: str) -> Context:
        return Context(tolerance, theirs.mesh, (), None, *_heads_of(name, heads))

    unequal = theirs.unequal | {f"{against.path}: {name}": why for name, why in against.unequal.items()}
    return _compared(other, mine, dict.fromkeys(mine, tolerance), context, unequal, None)


def _tolerances(ours: Named, rounded: Named, path: str) -> dict[str, float]:
    """Return for each tensor of our run, which must be finite, how much rounding may differ in another program."""
    for name, value in ours.items():
        if not np.isfinite(value).all():
            raise UsageError(
                f"our run of the weights in {quoted_path(path)} is not finite: of {name!r}, {not_finite(value, value)};"
                " nothing can be compared with it"
            )
    noise = {name: distance(rounded[name], value) for name, value in ours.items()}
    typical = float(np.median(list(noise.values())))
    return {name: max(LEAST, MARGIN * max(typical, noise[name])) for name in ours}


def _common(theirs: Named, ours: Named) -> list[str]:
    """Return the names that both have, in the order of `ours`; UsageError unless these are all of theirs."""
    unknown = [name for name in theirs if name not in ours]
    common = [name for name in ours if name in theirs]
    if not common:
        raise UsageError(
            "no tensor of the dump has a name that the other side has: theirs are"
            f" {quoted(next(iter(theirs), 'none'))}, ours {quoted(next(iter(ours), 'none'))}; name the map with names"
            " in layout.json, and --model"
        )
    if unknown:
        raise UsageError(
            f"{len(unknown)} tensors of the dump have no counterpart, such as {quoted(unknown[0])}; leave them out of"
            " the dump, or name the map of their names in layout.json"
        )
    return common


def _compared(
    theirs: Named,
    ours: Named,
    tolerances: Mapping[str, float],
    context: Any,
    unequal: dict[str, str],
    loss: tuple[float, float] | None,
) -> DumpComparison:
    """Compare what both have, in the order of `ours`; UsageError when nothing has a common name."""
    common = _common(theirs, ours)
    # A gradient that is truly zero, such as that of attention's key bias, is nothing but rounding on both sides.
    largest_norm = max(float(np.linalg.norm(ours[name])) for name in common)
    differences, largest = [], 0.0
    for name in common:
        mine, other = ours[name], theirs[name]
        # The larger of both norms, and NaN where one of them is.
        norm = np.maximum(np.linalg.norm(mine), np.linalg.norm(other))
        if mine.shape == other.shape and norm < SMALL * largest_norm:
            continue
        found = distance(other, mine)
        if not (np.isfinite(found) and found <= tolerances[name]):
            patterns = explain(other, mine, context(name))
            differences.append(Difference(name, found, tolerances[name], patterns))
        else:
            largest = max(largest, found)
    kinds = {name.split("/")[0] for name in common}
    missing = [
        name for name in ours if name not in theirs and name.split("/")[0] in kinds and name != "activations/loss"
    ]
    return DumpComparison(
        len(common), differences, unequal, missing, largest, max(tolerances[name] for name in common), loss, common
    )


def _samples(batch: Mapping[str, np.ndarray], prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets (rows, T); without targets those of the next token, as Hugging Face shifts them."""
    tokens, targets = batch[f"{prefix}tokens"], batch.get(f"{prefix}targets")
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or (targets is not None and targets.shape != tokens.shape):
        raise UsageError(f"batch/{prefix}tokens is {tokens.dtype} of shape {tokens.shape}; it holds integers (rows, T)")
    inputs, wanted = (tokens[:, :-1], tokens[:, 1:]) if targets is None else (tokens, targets)
    return np.ascontiguousarray(inputs, np.int64), np.ascontiguousarray(wanted, np.int64)


def _kv_heads(name: str, found: tuple[int, ...], expected: tuple[int, ...], keys: int) -> str:
    """Return the remedy for a matrix of keys or values with another number of heads: the flag with this number."""
    is_of_keys = ".k_proj." in name or ".v_proj." in name
    if not is_of_keys or found[1:] != expected[1:] or found[0] * keys % expected[0]:
        return ""
    return f"; give --kv-heads {found[0] * keys // expected[0]}"


def _run(model: str, heads: Heads, weights: Named, inputs: np.ndarray, targets: np.ndarray, dtype: str) -> Named:
    """Return activations in the order of forward, then gradients in the order of backward, in float64."""
    net = _model(model, heads, weights, inputs.shape[1], dtype)
    for parameter in net.parameters():
        if parameter.name not in weights:
            raise UsageError(f"the dump has no weights/{parameter.name}; dump all weights of the {model}")
        value = weights[parameter.name]
        if value.shape != parameter.shape:
            raise UsageError(
                f"weights/{parameter.name} has the shape {value.shape}; the model has"
                f" {parameter.shape}{_kv_heads(parameter.name, value.shape, parameter.shape, heads.keys)}"
            )
        parameter.data[...] = value.astype(parameter.dtype)
        parameter.updated()
    if inputs.min() < 0 or max(inputs.max(), targets.max()) >= weights[EMBEDDINGS[model]].shape[0]:
        raise UsageError(f"batch/tokens has values outside of 0 to {weights[EMBEDDINGS[model]].shape[0] - 1}")

    # The forward pass, block by block, so that what each of them returns can be compared.
    result: Named = {}
    decoder = net.decoder
    x: Tensor = decoder.embed(inputs) if model == "gpt" else decoder.embed_tokens(inputs)
    for number, block in enumerate(net.blocks):
        x = block(x) if model == "gpt" else block(x, decoder.rotary_emb(np.arange(inputs.shape[1])))
        result[f"activations/{BLOCKS[model].format(number)}"] = x.data.astype(np.float64)
    norm = decoder.ln_f if model == "gpt" else decoder.norm
    logits = net.lm_head(norm(x))
    loss = net.loss_fn(logits, targets, None)
    result["activations/logits"] = logits.data.astype(np.float64)
    result["activations/loss"] = np.asarray(loss.data, np.float64)

    loss.backward()
    for parameter in reversed(list(net.parameters())):
        assert parameter.grad is not None
        result[f"gradients/{parameter.name}"] = np.asarray(parameter.grad, np.float64)
    return result


def _model(model: str, heads: Heads, weights: Named, length: int, dtype: str) -> Any:
    """Return a model with the sizes that the weights have."""
    table = weights.get(EMBEDDINGS[model])
    if table is None or table.ndim != 2:
        raise UsageError(
            f"the dump has no matrix weights/{EMBEDDINGS[model]}; name the map of its names in layout.json"
            " (names: huggingface, torchtitan, megatron), and --model"
        )
    rows, width = table.shape
    numbers = [int(found[1]) for name in weights if (found := re.match(r".*\.(?:h|layers)\.(\d+)\.", name))]
    layers = 1 + max(numbers, default=-1)
    if model == "gpt":
        places = weights.get("transformer.wpe.weight", np.empty((length, width))).shape[0]
        return GPT(GPTConfig(rows, places, width, layers, heads.query), named_dtype(dtype))
    gate = weights.get("model.layers.0.mlp.gate_proj.weight", np.empty((width, width)))
    sizes = LlamaConfig(rows, width, gate.shape[0], layers, heads.query, heads.keys, length)
    return Llama(sizes, named_dtype(dtype))


def _heads_of(name: str, heads: Heads) -> tuple[int, int, int]:
    """Return how many heads a tensor has, the dim along which they lie, and how many parts have all of them.

    0 heads for tensors that have none.
    """
    if name.endswith(("attn.c_attn.weight", "attn.c_attn.bias")):
        return heads.query, -1, 3
    if name.endswith(("q_proj.weight", "attn.c_proj.weight")):
        return heads.query, 0, 1
    if name.endswith("o_proj.weight"):
        return heads.query, 1, 1
    return heads.keys if name.endswith(("k_proj.weight", "v_proj.weight")) else 0, 0, 1
