"""--quantize int8: layers that round their operands to 8 bits while they train, and integer products afterwards."""
