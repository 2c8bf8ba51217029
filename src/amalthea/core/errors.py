"""Errors that a user can cause. Each names the subject, what it got, what it expected and what to do.

The command line prints the message on one line and exits with `exit_code`; anything else that escapes
is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class AmaltheaError(Exception):
    """Base of all errors whose message is meant for the user."""

    exit_code = 2


class ConfigError(AmaltheaError):
    """The configuration is wrong; `problems` holds every one that was found, not just the first."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class PlacementError(AmaltheaError):
    """A parameter cannot lie, or be computed, where it was asked to."""


class InfeasiblePlan(AmaltheaError):  # noqa: N818 - the field's term
    """The plan cannot run on the cluster it was made for."""


class CheckpointError(AmaltheaError):
    """A checkpoint cannot be written or read."""


class DataError(AmaltheaError):
    """A corpus, tokenizer or token shard is missing, empty or damaged."""


class MissingDependencyError(AmaltheaError):
    """An optional package is needed for what was asked."""


class TrainingError(AmaltheaError):
    """The run cannot go on: its numbers are no longer finite, or its ranks disagree."""

    exit_code = 1
