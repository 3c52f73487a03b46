"""--distill-from CHECKPOINT: a student learns from labels and from the logits of a trained model, its teacher."""
