"""Where a matrix lives, and where it is orthogonalized: layouts, plans over them, and their execution."""
