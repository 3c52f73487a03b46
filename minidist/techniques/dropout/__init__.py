"""--dropout, --attention-dropout: activations are zeroed at random while the model trains."""
