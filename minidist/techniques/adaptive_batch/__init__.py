"""--noise-scale, --adaptive-batch, --weights measured:K: the batch of each step follows from measurements."""
