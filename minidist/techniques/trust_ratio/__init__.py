"""--optimizer lars, lamb: the learning rate of each layer follows from its norm, which ranks add together."""
