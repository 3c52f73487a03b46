"""How fast is it? One harness, and one file per comparison."""
