"""--optimizer muon: whole matrices, of which each rank has a part, are orthogonalised."""
