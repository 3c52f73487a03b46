"""--quantize int8: layers that round their operands to 8 bits while they train, and integer products afterwards."""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.techniques.quantization.layers import (
        convert,
        converted,
        int8_bytes,
        load_ranges,
        observers_of,
        prepare_qat,
        ranges_state,
    )
    from minidist.techniques.quantization.ranges import doubling_volume, ranges_volume, update_ranges
    from minidist.techniques.quantization.split_layers import agree_on_weights, prepare_split_qat
__getattr__, __dir__ = lazy_imports(__name__, __file__)
