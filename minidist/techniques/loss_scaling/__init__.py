"""--precision fp16: the loss is multiplied before backward, and a step whose gradients overflow is left out."""
