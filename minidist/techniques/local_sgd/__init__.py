"""--local-steps: local SGD, and with an outer optimizer DiLoCo and Streaming DiLoCo."""
