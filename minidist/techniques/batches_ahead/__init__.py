"""--prefetch-batches, --loader-workers: the batches of later steps are made while this one trains."""
