"""The model that a config describes, whole and with its initial values: the same on every rank and on one device.

Proved by: tests/config/test_own_model.py, tests/commands/test_generation.py
"""

import inspect
from typing import Any

from minidist.base.errors import MinidistError, UsageError, quoted, reason
from minidist.base.half import DTYPES, named_dtype
from minidist.base.user_file import load_function
from minidist.core.nn import GPT, MLP, GPTConfig, Module
from minidist.job.config.train_config import TrainConfig, flag
from minidist.techniques import model_options

ITEMSIZE = {"fp32": 4, "fp64": 8, "fp16": 2, "bf16": 2}


def make_model(config: TrainConfig, dataset: Any) -> Any:
    """Return the whole model with its initial values; of a language model's `dataset` only the vocab_size counts."""
    dtype, options = named_dtype(DTYPES[config.precision]), model_options(config)
    if config.model == "gpt":
        gpt = dataset.vocab_size, config.context, config.width, config.layers, config.heads
        return GPT(GPTConfig(*gpt, n_experts=config.experts, **options), dtype=dtype, seed=config.seed)

    if config.model == "llama":
        from minidist.nn import Llama, LlamaConfig

        sizes = dataset.vocab_size, config.width, llama_inner(config), config.layers, config.heads, config.kv_heads
        llama = LlamaConfig(*sizes, config.context, num_local_experts=config.experts, **options)
        return Llama(llama, dtype=dtype, seed=config.seed)

    if config.is_own_model:
        return own_model(config, dataset)

    if config.model == "cnn":
        from minidist.nn import CNN

        shape = dataset.image, dataset.classes, config.width, config.layers
        return CNN(*shape, channels_last=dataset.channels_last, dtype=dtype, seed=config.seed, **options)

    # A classifier: `layers` hidden layers of `width` between the features and the classes.
    return MLP([dataset.features, *[config.width] * config.layers, dataset.classes], dtype=dtype, seed=config.seed)


def own_model(config: TrainConfig, dataset: Any) -> Module:
    """Return the model of FILE.py:FUNCTION: FUNCTION(), FUNCTION(config) or FUNCTION(config, dataset).

    Its forward takes what the data set gives (tokens as integers, features as a Tensor) and returns logits. Every rank
    calls the function, so it has to return the same values every time. UsageError when it raises, or returns anything
    but a Module with parameters in the dtype of --precision.
    """
    function, source = load_function(config.model), config.model
    try:
        # As many arguments as the function takes; a class or a builtin may not tell.
        taken = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if not taken:
            _sizes_are_not_given(config, dataset)
        model = function(*(config, dataset)[: len(taken)])
    except MinidistError:
        raise
    except Exception as error:
        raise UsageError(f"--model {source} raises {reason(error, named=True)}; correct the function") from error

    if not isinstance(model, Module) or not any(True for _ in model.parameters()):
        raise UsageError(f"--model {source} returns {quoted(model)}; return a minidist.Module that has parameters")

    # Names are the places in the model, on every rank the same: checkpoints, comparisons and dropout's draws use them.
    for name, module in model.named_modules():
        module.name = name
    for name, parameter in model.named_parameters():
        parameter.name = name
        if parameter.dtype != named_dtype(DTYPES[config.precision]):
            raise UsageError(
                f"--model {source} has a parameter {quoted(name)} of {parameter.dtype}, and --precision is"
                f" {config.precision}; make its layers with dtype={quoted(DTYPES[config.precision])}, or change"
                " --precision"
            )
    return model


def _sizes_are_not_given(config: TrainConfig, dataset: Any) -> None:
    """Raise UsageError when a size of a model is set, and the model's function takes no config to read it from."""
    # Of tokens, the context is the length of a sample; of labelled samples it could only be the model's.
    for name in ("layers", "width", "heads", *(() if dataset.is_tokens else ("context",))):
        if getattr(config, name) != TrainConfig.model_fields[name].default:
            raise UsageError(
                f"{flag(name)} {getattr(config, name)} has no effect, because the function of --model"
                f" {quoted(config.model, marks=False)} takes no config; write FUNCTION(config) and read config.{name},"
                " or leave it out"
            )


def llama_inner(config: TrainConfig) -> int:
    """Return Llama's inner width: --ffn, or 8/3 of the width, rounded up to a multiple of the heads."""
    if config.ffn is not None:
        return config.ffn
    # -(-a // b) is a / b rounded up.
    return -(-8 * config.width // (3 * config.heads)) * config.heads


def activation_shape(config: TrainConfig, dataset: Any) -> tuple[int, ...]:
    """Return the shape of one sample's activation between two blocks of a model of the package's own."""
    if config.model == "cnn":
        from minidist.nn.cnn import block_shape

        return block_shape(dataset.image, config.width)
    return (config.width,) if config.model == "mlp" else (config.context, config.width)


def parameter_count(config: TrainConfig, rows: int) -> int:
    """Return about how many parameters the model has, without making it.

    rows: the vectors of `width` elements at its two ends: tokens of the vocabulary, or features and classes; of a CNN
    the weights of a channel of the first convolution, and classes.
    """
    # A block has 4 width^2 weights in attention and 8 width^2 in each MLP, whose inner width is 4 width; a layer of a
    # classifier has width^2, and a residual block two convolutions of 9 width^2. Added to these are the embeddings of
    # tokens and positions.
    width = config.width
    inner = {"mlp": 1, "cnn": 18}.get(config.model, 4 + 8 * max(1, config.experts))
    return config.layers * inner * width * width + (rows + config.context) * width
