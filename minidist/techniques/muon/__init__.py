"""--optimizer muon: whole matrices are orthogonalised, although each rank has a part of them."""
