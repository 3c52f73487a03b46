"""Context parallelism: the sequence is split over ranks, attention included (ring attention)."""
