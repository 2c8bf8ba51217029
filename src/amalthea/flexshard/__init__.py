"""Where a matrix lives, and where it is orthogonalised."""
