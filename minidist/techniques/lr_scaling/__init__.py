"""--lr-scaling, --base-batch: the learning rate follows the size of the global batch."""
