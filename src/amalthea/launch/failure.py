"""When one rank fails, one rank speaks and all leave.

The failing rank writes its exit code into the run's store *before* its connections close. The others find
themselves cut off in the middle of a collective, look there, and leave with that code and without a word.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from amalthea.core.errors import AmaltheaError, CheckpointError, TrainingError
from amalthea.core.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")

_FAILED = "failed"
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
PATIENCE = timedelta(hours=24)
"""How long ranks wait for what the main one does alone, such as preparing a large corpus."""


class FailedElsewhere(Exception):  # noqa: N818 - no error of this rank
    """Another rank failed and has said so; leave with its exit code."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"another rank failed with exit code {exit_code}")


def run_together(story: Callable[[], int], *, world: World, store: Store, run_dir: Path | None = None) -> int:
    """Run `story` on every rank; returns its exit code, or the code of the rank that failed first.

    Raises on one rank only, the one that is to speak: whatever `story` raised, with an `OSError` of the disk
    or below `run_dir` turned into a `CheckpointError`, and a lost connection into a `TrainingError`.
    """
    try:
        return story()
    except FailedElsewhere as error:
        return error.exit_code
    except Exception as error:
        failure = explain_failure(error, world=world, run_dir=run_dir)
        code = failure.exit_code if isinstance(failure, AmaltheaError) else 1
        first_code = _claim(store, world, code, alone_at_fault=not is_lost_connection(error))
        if first_code is not None:
            return first_code
        raise failure from (None if failure is error else error)


def on_main_rank(work: Callable[[], T], *, world: World) -> T:
    """Run `work` on rank 0 while the others wait; every rank returns its result.

    Raises:
        FailedElsewhere: on the other ranks, when rank 0 raised.

    Communication: a barrier and one object broadcast over the CPU, however long `work` takes.
    """
    if world.size == 1:
        return work()
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert not isinstance(group, int)  # every rank is a member
    assert group is not None
    try:
        # torch has none here: a rank that is done would close its connections while another one still makes them.
        dist.barrier(group=group)
        return _share(work, world=world, group=group)
    finally:
        dist.destroy_process_group(group)


def explain_failure(error: Exception, *, world: World, run_dir: Path | None) -> Exception:
    """The error as the user should see it; faults of ours come back as they are."""
    if isinstance(error, OSError) and _is_of_run_dir(error, run_dir):
        where = error.filename or run_dir
        return CheckpointError(
            f"cannot write {where}: {error.strerror or error}; mend that or name another --run-dir. "
            f"What was saved before is untouched"
        )
    if is_lost_connection(error):
        reason = re.sub(r"^\[[^]]*\] *", "", str(error)).partition("\n")[0].partition(". ")[0]
        return TrainingError(f"rank {world.rank} lost the other ranks ({reason}); see what they wrote last")
    return error


def is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def _share(work: Callable[[], T], *, world: World, group: ProcessGroup) -> T:
    import torch.distributed as dist

    outcome: list[Any] = [None]
    if world.is_main:
        try:
            outcome = [(True, work())]
        except BaseException as error:
            code = error.exit_code if isinstance(error, AmaltheaError) else 1
            dist.broadcast_object_list([(False, code)], src=0, group=group)
            raise
    dist.broadcast_object_list(outcome, src=0, group=group)
    succeeded, value = outcome[0]
    if not succeeded:
        raise FailedElsewhere(value)
    return value


def _claim(store: Store, world: World, code: int, *, alone_at_fault: bool) -> int | None:
    """`None` if this rank is the first to fail and is to speak, else the first one's exit code."""
    if world.size == 1:
        return None
    mine = f"{world.rank} {code}"
    try:
        first = store.compare_set(_FAILED, "", mine).decode()
    except RuntimeError:
        # The store went with rank 0. Ranks that were merely cut off say so once per node.
        return None if alone_at_fault or world.local_rank == 0 else code
    return None if first == mine else int(first.split()[1])


def _is_of_run_dir(error: OSError, run_dir: Path | None) -> bool:
    if error.errno in _DISK_ERRORS:
        return True
    if run_dir is None or error.filename is None:
        return False
    path, folder = Path(str(error.filename)).absolute(), run_dir.absolute()
    return path == folder or folder in path.parents or path in folder.parents
