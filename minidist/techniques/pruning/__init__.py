"""--sparsity, --sparsity-pattern: weights of linear layers that become zero while the job trains."""
