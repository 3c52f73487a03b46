"""--momentum, --nesterov, --betas, --eps: the symbols of an optimizer's formula."""
