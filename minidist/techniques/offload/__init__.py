"""--offload: optimizer state, activations or shards of parameters are kept in host memory."""
