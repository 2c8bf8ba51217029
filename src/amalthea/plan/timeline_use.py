"""Sets of moments: when something runs, when it runs while something else does not, and how much by a given time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amalthea.plan.step_speeds import Floats


@dataclass(frozen=True)
class Intervals:
    """Moments as disjoint intervals in order, seconds [I]. Made by `union`."""

    starts: Floats
    ends: Floats

    @property
    def seconds(self) -> float:
        return float((self.ends - self.starts).sum())

    def until(self, times: Floats) -> Floats:
        """Seconds of these before each of `times`."""
        if not len(self.starts):
            return np.zeros(len(times))
        edges = np.stack((self.starts, self.ends), axis=1).ravel()
        lengths = np.stack((self.starts - self.starts, self.ends - self.starts), axis=1).ravel()
        return np.interp(times, edges, np.cumsum(lengths), left=0.0)

    def minus(self, other: Intervals) -> Intervals:
        """Moments of these that are not among `other`'s."""
        times = np.concatenate((self.starts, self.ends, other.starts, other.ends))
        ours = np.repeat((1, -1, 0, 0), (len(self.starts),) * 2 + (len(other.starts),) * 2)
        theirs = np.repeat((0, 0, 1, -1), (len(self.starts),) * 2 + (len(other.starts),) * 2)
        order = np.argsort(times, kind="stable")
        times = times[order]
        inside = (np.cumsum(ours[order]) > 0) & (np.cumsum(theirs[order]) == 0)
        keep = inside[:-1] & (times[1:] > times[:-1])
        return Intervals(times[:-1][keep], times[1:][keep])


def union(starts: Floats, ends: Floats) -> Intervals:
    """Moments in any of the intervals [K], which may overlap and come in any order; empty ones do not count."""
    some = ends > starts
    order = np.argsort(starts[some], kind="stable")
    starts, ends = starts[some][order], ends[some][order]
    if not len(starts):
        return Intervals(starts, ends)
    reached = np.maximum.accumulate(ends)
    first = np.concatenate(([True], starts[1:] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(starts[first], reached[last])
