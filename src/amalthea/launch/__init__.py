"""How a process learns its place in the run: torchrun, Slurm or alone."""
