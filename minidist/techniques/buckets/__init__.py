"""--bucket-cap-mb, --reduce-bucket-size: how many gradients one message has."""
