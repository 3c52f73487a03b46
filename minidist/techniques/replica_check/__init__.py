"""--check-replicas: after every step all copies of every parameter are compared, bit for bit."""
