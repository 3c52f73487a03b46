"""--synchronize-each: gradients are reduced after every micro-batch, and not once per step."""
