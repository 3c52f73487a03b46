"""In which dtypes an FSDP unit is gathered, computes and is reduced, when its shards are float32.

    shard        float32, 4 B per parameter: what the optimizer updates, master and parameter in one
    gather       cast to `param_dtype`: 2 B per parameter travel, twice per micro-batch; the unit computes in it
    reduce       gradients travel in `reduce_dtype`; the shard's sum is float32
    output       the unit's results, cast to `output_dtype`

The other way, ZeRO's, is a model whose parameters are in half precision from the start (`GPT(config,
dtype=float16)`); the optimizer then keeps the float32 masters. Both hold 16 bytes per parameter with Adam, 4 + 4 + 8 or
2 + 2 + 12, and make the same bits when they start from the same values.

Source: Zhao et al., "PyTorch FSDP", VLDB 2023, section 4.4; PyTorch's `MixedPrecisionPolicy`.
Proved by: tests/parallel/test_mixed_precision_policy.py
"""

from dataclasses import dataclass
from typing import Any

from minidist.base.half import is_floating
from minidist.core.autograd.backward import map_tensors
from minidist.core.base import arrays as xp


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit. None means: no cast of parameters or output; for `reduce_dtype`, the same as `param_dtype`.

    cast_forward_inputs: floating-point tensors among the module's arguments are cast to `param_dtype`.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True

    def inputs(self, values: Any) -> Any:
        """Return the arguments of the module as it computes with them."""
        return cast_floats(values, self.param_dtype) if self.cast_forward_inputs else values

    def outputs(self, values: Any) -> Any:
        """Return the results of the module as its caller gets them."""
        return cast_floats(values, self.output_dtype)

    def in_words(self) -> dict[str, str]:
        """Return the settings by name, in words that are equal where the dtypes are: for ranks to compare."""
        return {
            name: str(value if value is None or isinstance(value, bool) else xp.dtype(value))
            for name, value in vars(self).items()
        }


def cast_floats(value: Any, dtype: Any) -> Any:
    """Return `value` with every floating-point tensor cast, wherever `map_tensors` looks; None casts nothing."""
    if dtype is None:
        return value

    # Integers (tokens, positions) stay as they are: only floats have a precision to choose.
    return map_tensors(value, lambda x: x.astype(dtype) if is_floating(x.dtype) else x)
