"""Is a layout sound? Every row in one unit, every unit with one owner, no matrix cut in silence, memory in bounds."""

from __future__ import annotations

from collections import defaultdict

from amalthea.core.errors import PlacementError
from amalthea.flexshard.layout import Layout

_BF16_BYTES = 2


def check_layout(layout: Layout, *, max_scratch_bytes: int | None = None) -> None:
    """Raises PlacementError naming the first parameter, unit or rank that is wrong.

    `max_scratch_bytes` bounds the whole matrices that an owner assembles from others' pieces. Costs a pass over all
    pieces; for tests and for `plan`, not for every start.
    """
    _check_units(layout)
    scratch: dict[tuple[int, int], int] = defaultdict(int)
    for index, (unit, owner) in enumerate(zip(layout.units, layout.owners, strict=True)):
        parameter = layout.parameters[unit.parameter]
        name = f"{parameter.name}, expert {unit.expert}, rows {unit.start}-{unit.stop}"
        if not (0 <= owner.replica < layout.grid.num_replicas and 0 <= owner.rank < layout.grid.num_ranks):
            raise PlacementError(f"{name}: the owner {owner} is not in {layout.grid}")
        row = unit.start
        for piece in layout.pieces(unit):
            if piece.start != row or piece.stop <= piece.start or not 0 <= piece.rank < layout.grid.num_ranks:
                raise PlacementError(f"{name}: piece {piece} does not follow row {row}")
            _check_held(layout, index, piece.rank, piece.start, piece.stop)
            row = piece.stop
        if row != unit.stop:
            raise PlacementError(f"{name}: its pieces end at row {row}")
        if not layout.is_local(index):
            scratch[owner] += (unit.stop - unit.start) * parameter.columns * _BF16_BYTES
    if max_scratch_bytes is not None and scratch:
        owner, most = max(scratch.items(), key=lambda item: item[1])
        if most > max_scratch_bytes:
            raise PlacementError(
                f"rank {owner} would assemble {most:,} bytes of matrices, more than {max_scratch_bytes:,}; "
                "use more ranks per replica or store experts whole"
            )


def _check_units(layout: Layout) -> None:
    if len(layout.units) != len(layout.owners):
        raise PlacementError(f"{len(layout.units)} units have {len(layout.owners)} owners")
    seen: dict[tuple[int, int], int] = defaultdict(int)
    for unit in layout.units:
        parameter, key = layout.parameters[unit.parameter], (unit.parameter, unit.expert)
        if not (0 <= unit.expert < parameter.num_experts and 0 <= unit.start < unit.stop <= parameter.rows):
            raise PlacementError(f"{parameter.name}: {unit} is not inside {parameter.shape}")
        if unit.start > seen[key]:
            raise PlacementError(f"{parameter.name}: rows {seen[key]}-{unit.start} in no unit")
        if unit.start < seen[key]:
            raise PlacementError(f"{parameter.name}: row {unit.start} is in two units")
        seen[key] = unit.stop
    for number, parameter in enumerate(layout.parameters):
        for expert in range(parameter.num_experts):
            if seen[number, expert] != parameter.rows:
                raise PlacementError(f"{parameter.name}, expert {expert}: its last rows are in no unit")


def _check_held(layout: Layout, index: int, rank: int, start: int, stop: int) -> None:
    unit = layout.units[index]
    box = layout.parameters[unit.parameter].box(layout.grid, rank)
    inside = box.expert_start <= unit.expert < box.expert_stop and box.row_start <= start < stop <= box.row_stop
    if not inside:
        raise PlacementError(
            f"{layout.parameters[unit.parameter].name}: rank {rank} is to send rows {start}-{stop} of expert "
            f"{unit.expert}, but it holds {box}"
        )
