"""--repartition-every: the stages of a pipeline are cut anew while it trains."""
