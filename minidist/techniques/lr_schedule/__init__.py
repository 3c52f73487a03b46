"""--warmup, --decay: the learning rate follows the number of the step."""
