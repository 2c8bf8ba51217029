"""A user's own cluster, described in a TOML file:

    gpu = "H100 SXM"
    gpus_per_node = 8
    peak_tflops = 989            # dense bf16, of one GPU
    hbm_gb = 80
    hbm_tb_per_s = 3.35
    intra_gb_per_s = 450         # out of one GPU to its node, one direction
    inter_gb_per_s = 50          # network card of one GPU, one direction
    host_gb = 256                # host memory per GPU
    gpu_watts = 700              # of one GPU, for the energy; may be left out

Optional are `name` (default: the file's), `num_nodes`, `intra_pair_gb_per_s`, `hbm_visible_gib`,
`host_link_gb_per_s`, `nodes_per_group`, `time_limit_h`, `network`, `scheduler`, `source`, `unverified`, `notes`.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from amalthea.config.explain import explain, unknown_key
from amalthea.core.component import Component
from amalthea.core.errors import ConfigError
from amalthea.plan.clusters import Cluster, get_cluster

Positive = Annotated[float, Field(gt=0)]


class ClusterFile(Component):
    """The keys of such a file, as in `Cluster`."""

    name: str | None = None
    gpu: str
    num_nodes: Annotated[int, Field(ge=1)] | None = None
    gpus_per_node: Annotated[int, Field(ge=1)]
    peak_tflops: Positive
    hbm_gb: Positive
    hbm_visible_gib: Positive | None = None
    hbm_tb_per_s: Positive
    intra_gb_per_s: Positive
    intra_pair_gb_per_s: Positive | None = None
    inter_gb_per_s: Positive
    host_gb: Positive
    host_link_gb_per_s: Positive | None = None
    nodes_per_group: Annotated[int, Field(ge=1)] | None = None
    time_limit_h: Positive | None = None
    gpu_watts: Positive | None = None
    network: str = "not described"
    scheduler: str = "not described"
    source: str = "a file of the user's own"
    unverified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_cluster(name: str) -> Cluster:
    """A preset by its name, or a file by its path, which ends in `.toml`. Raises ConfigError."""
    return read_cluster(Path(name)) if name.endswith(".toml") else get_cluster(name)


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a TOML file.

    Raises ConfigError: no such file, no TOML, or keys that are missing, unknown or out of range, each by its name.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"cluster file {path} does not exist; give a preset's name or a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cluster file {path} cannot be read as TOML: {error}") from None
    found, problems = _validate(content)
    if found is None or problems:
        raise ConfigError(*(f"cluster file {path}: {problem}" for problem in problems))
    values: dict[str, Any] = dict(found) | {"name": found.name or path.stem}
    return Cluster(**values)


def _validate(content: dict[str, Any]) -> tuple[ClusterFile | None, list[str]]:
    """The file's keys, and every problem with them at once."""
    unknown = [key for key in content if key not in ClusterFile.model_fields]
    problems = [unknown_key(key, root=ClusterFile) for key in unknown]
    try:
        found = ClusterFile.model_validate({key: value for key, value in content.items() if key not in unknown})
    except ValidationError as error:
        return None, [*problems, *explain(error, root=ClusterFile)]
    return found, [*problems, *_contradictions(found)]


def _contradictions(found: ClusterFile) -> list[str]:
    """What no key has wrong by itself."""
    problems = []
    pair = found.intra_pair_gb_per_s
    if pair is not None and pair > found.intra_gb_per_s:
        problems.append(
            f"intra_pair_gb_per_s is {pair:g}, more than the {found.intra_gb_per_s:g} of intra_gb_per_s to all "
            "neighbours together; give what goes to one of them"
        )
    known = {field.name for field in fields(Cluster)}
    if unknown := [name for name in found.unverified if name not in known]:
        problems.append(f"unverified names {', '.join(unknown)}; name keys of this file")
    return problems
