"""One file a lesson: its exercises, our solutions, and the hints."""
