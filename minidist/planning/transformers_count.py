"""Counts a model of a kind that minidist has no row for by building it with `transformers`, without memory for weights.

The module is built on PyTorch's meta device, so that tensors have shapes and no values, and nothing is downloaded: code
that a file names is not run. Its largest list of modules is taken for the layers. Which matrices a layout divides is
not known: matrices are counted as divided by tensor parallelism, vectors are not, and what has "experts" in its name is
divided by expert parallelism.

Proved by: tests/planning/test_transformers_count.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.base.errors import UsageError, quoted, reason
from minidist.planning.architecture import Architecture, Block
from minidist.planning.decoder import with_projection
from minidist.planning.parts import Part

MAX_MODULES = 2_000  # layers that are built, and experts of one: each may be a module
GUESSED = "the model is counted by transformers, and planned by guessing which of its matrices a layout divides"
INSTALL = "install transformers and torch, with which minidist counts every kind that transformers knows, or"
DESCRIBE = "describe a model of similar sizes with --layers, --hidden and --heads of minidist plan"


def count_by_building(kind: str, content: Mapping[str, Any], file: str, similar: str) -> Architecture:
    """Return the architecture of a file of any kind that the installed `transformers` knows.

    similar: what follows the name of an unknown kind in a sentence. Errors: UsageError without `transformers`, for a
    kind that it does not know, for a file that it refuses, and for a model whose number of layers would make building
    it take minutes.
    """
    unknown = f"model_type {quoted(kind)} in {file} is not in minidist's table of models{similar}"
    try:
        import torch
        import transformers
    except ImportError:
        raise UsageError(f"{unknown}; {INSTALL} {DESCRIBE}") from None
    transformers.logging.set_verbosity_error()
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(f"{unknown}, and transformers {transformers.__version__} does not know it; {DESCRIBE}")
    _check_modules(content, file)
    try:
        # How weights are stored changes no count, and needs libraries that read them.
        config = transformers.CONFIG_MAPPING[kind].from_dict(
            {key: value for key, value in content.items() if key != "quantization_config"}
        )
        with torch.device("meta"):
            module = _class_of(transformers, kind).from_config(config)
            model = _architecture(module, config.get_text_config())
            auto = transformers.models.auto.modeling_auto
            if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in auto.MODEL_MAPPING_NAMES:
                return model
            # What AutoModel leaves out is the output projection.
            projection = model.parameters - _count(transformers.AutoModel.from_config(config))
            return with_projection(model, projection) if projection > 0 else model
    except Exception as error:  # whatever transformers raises for a wrong file
        by = f"transformers {transformers.__version__} cannot build the {kind} model of {file}"
        raise UsageError(f"{by} ({reason(error)}); correct the file") from None


def _check_modules(content: Any, file: str) -> None:
    """Raise UsageError for too many layers or experts: each would be a module."""
    for key, value in content.items() if isinstance(content, dict) else ():
        _check_modules(value, file)
        is_count = key.endswith(("layers", "experts", "depth", "n_layer"))
        if is_count and isinstance(value, int) and value > MAX_MODULES:
            raise UsageError(f"{key} in {file} is {value}; transformers is asked to build at most {MAX_MODULES:,}")


def _class_of(transformers: Any, kind: str) -> Any:
    """Return the class that builds a kind: with an output projection, if there is one."""
    auto = transformers.models.auto.modeling_auto
    for name, mapping in (
        ("AutoModelForCausalLM", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageTextToText", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        ("AutoModelForSeq2SeqLM", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForTextToWaveform", auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES),
        ("AutoModelForMaskedLM", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        if kind in mapping:
            return getattr(transformers, name)
    return transformers.AutoModel


def _architecture(module: Any, config: Any) -> Architecture:
    """Return the sizes of a module. config: that of its language model."""
    import torch

    # The layers are the list with the most parameters.
    lists = [child for child in module.modules() if isinstance(child, torch.nn.ModuleList)]
    layers = max(lists, key=_count) if lists else [module]
    experts, top_k = _number(config, ("num_local_experts", "num_experts", "n_routed_experts")), 0
    top_k = _number(config, ("num_experts_per_tok", "moe_topk", "top_k_experts"), int(experts > 0))
    width, heads = _number(config, ("hidden_size",), 1), _number(config, ("num_attention_heads",), 1)
    parts = [_part(layer, experts, top_k) for layer in layers]
    kinds = list(dict.fromkeys(parts))
    vocabulary = _number(config, ("vocab_size",), 1)
    outside = _count(module) - sum(part.total for part in parts)
    return Architecture(
        layers=len(parts),
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        positions=_number(config, ("max_position_embeddings", "n_positions"), 2048),
        inner=_number(config, ("intermediate_size",), 4 * width),
        gated=True,
        kv_heads=_number(config, ("num_key_value_heads",), heads),
        head_size=_number(config, ("head_dim",), max(1, width // heads)),
        tied=True,
        experts=experts if any(part.expert for part in parts) else 0,
        top_k=top_k,
        expert_inner=_number(config, ("moe_intermediate_size",)) or None,
        blocks=tuple(Block(part, 2 * width, part.expert > 0) for part in kinds),
        pattern=tuple(kinds.index(part) for part in parts),
        first=Part(replicated=outside - vocabulary * width),  # whatever is not in a layer
        last=Part(),
        approximations=(GUESSED,),
    )


def _part(layer: Any, experts: int, top_k: int) -> Part:
    split = replicated = expert = largest = 0
    for name, parameter in layer.named_parameters():
        size = parameter.numel()
        if ".experts." in f".{name}":
            expert += size
        elif parameter.dim() > 1:
            split, largest = split + size, max(largest, size)
        else:
            replicated += size
    used = expert * top_k // experts if experts else expert
    return Part(split, replicated, expert, expert - used, split + used, largest)


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _number(config: Any, names: tuple[str, ...], default: int = 0) -> int:
    """Return the first of several attributes that is a number above 0."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), default)
