"""How a model is spread over ranks: the mesh, expert parallelism, FSDP, seeds, reductions."""
