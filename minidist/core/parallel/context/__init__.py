"""Context parallelism: the sequence is split over ranks, attention included.

ring_attention.py       ring attention, and the global positions of a rank's tokens
"""
