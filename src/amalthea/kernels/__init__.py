"""Hot operations: each a fast path and its plain twin behind one function."""
