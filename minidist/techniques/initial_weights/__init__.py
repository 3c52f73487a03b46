"""--init-from: a new job begins with the weights of another one."""
