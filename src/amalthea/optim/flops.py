"""What orthogonalization costs, without torch: the planner weighs units by it."""

from __future__ import annotations


def orthogonalize_flops(rows: int, columns: int, *, num_steps: int = 5) -> int:
    """FLOP of one matrix in the standard form: 4·S²·L + 2·S³ each step, with sides S ≤ L."""
    small, large = min(rows, columns), max(rows, columns)
    return num_steps * (4 * small * small * large + 2 * small**3)
