"""The presets of clusters."""

from __future__ import annotations

from dataclasses import fields

import pytest

from amalthea.core.errors import ConfigError
from amalthea.plan.clusters import CLUSTERS, Cluster, get_cluster


def test_jupiter_has_its_published_size() -> None:
    jupiter = get_cluster("jupiter")
    assert jupiter.num_gpus == 23_536
    assert jupiter.inter_bytes_per_s == 25e9  # NDR200
    assert jupiter.peak_flops_per_s == 989e12


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_every_preset_is_whole_and_says_where_it_is_from(cluster: Cluster) -> None:
    assert CLUSTERS[cluster.name] is cluster
    assert cluster.source
    assert set(cluster.unverified) <= {field.name for field in fields(Cluster)}
    assert cluster.intra_gb_per_s > cluster.inter_gb_per_s > 0
    assert cluster.intra_pair_gb_per_s is None or cluster.intra_pair_gb_per_s <= cluster.intra_gb_per_s


@pytest.mark.parametrize(
    ("name", "meant"), [("jupyter", "jupiter"), ("LUMI_G", "lumi-g"), ("marenostrum5", "marenostrum5-acc")]
)
def test_an_unknown_cluster_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown cluster '{name}'; did you mean {meant}?"):
        get_cluster(name)


def test_a_cluster_like_none_lists_them_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown cluster 'zzz'; clusters are jupiter, .*, b200, and this$"):
        get_cluster("zzz")
