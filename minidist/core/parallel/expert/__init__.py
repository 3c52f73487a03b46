"""Expert parallelism: a mixture's experts are sharded over ranks, and all-to-alls bring the tokens to them."""
