"""What crosses components is checked before anything is built, every problem at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import small_config

from amalthea.config.check import ResolvedRun, check_vocab, dispatch_node_ranks, divisors, resolve
from amalthea.config.overrides import apply_overrides
from amalthea.core.errors import ConfigError

BOTH = "both parallel.dp_shard {} and model.moe.num_experts 16"


def resolved(world_size: int, *overrides: str) -> ResolvedRun:
    return resolve(apply_overrides(small_config(), overrides), world_size=world_size)


def problems(world_size: int, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolved(world_size, *overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("world_size", "overrides", "degrees"),
    [
        (1, [], (1, 1, 1, 1)),
        (4, [], (1, 4, 1, 4)),
        (4, ["parallel.ep=2"], (1, 4, 2, 2)),
        (4, ["parallel.ep=4"], (1, 4, 4, 1)),
        (4, ["parallel.dp_replicate=2"], (2, 2, 1, 2)),
        (4, ["parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.ep=2"], (2, 2, 2, 1)),
        (4, ["parallel.dp_replicate=4", "optim.matrices=muon"], (4, 1, 1, 1)),
        (3, ["parallel.dp_shard=3", "optim.experts=adamw", "train.global_batch_tokens=288"], (1, 3, 1, 3)),
    ],
)
def test_valid_degrees(world_size: int, overrides: list[str], degrees: tuple[int, ...]) -> None:
    run = resolved(world_size, *overrides)
    assert (run.dp_replicate, run.dp_shard, run.ep, run.efsdp) == degrees
    assert run.num_data_ranks == run.world_size == world_size


@pytest.mark.case(10)
@pytest.mark.parametrize(
    ("world_size", "overrides", "line"),
    [
        (4, ["parallel.ep=3"], f"parallel.ep is 3, but must divide {BOTH.format(4)}; valid: 1, 2, 4"),
        (4, ["parallel.ep=8"], f"parallel.ep is 8, but must divide {BOTH.format(4)}; valid: 1, 2, 4"),
        (
            4,
            ["parallel.dp_replicate=2", "parallel.ep=4"],
            f"parallel.ep is 4, but must divide {BOTH.format(2)}; valid: 1, 2",
        ),
        (
            4,
            ["parallel.dispatch_chunks=2"],
            "parallel.dispatch_chunks is 2, but with parallel.ep 1 no token travels to its experts; "
            "set parallel.dispatch_chunks=1 or raise parallel.ep",
        ),
        (1, ["parallel.ep=2"], f"parallel.ep is 2, but must divide {BOTH.format(1)}; valid: 1"),
        (
            4,
            ["parallel.dp_replicate=3"],
            "parallel.dp_replicate is 3, which does not divide the 4 ranks of this run; valid: 1, 2, 4",
        ),
        (
            4,
            ["parallel.dp_shard=2"],
            "parallel.dp_replicate 1 · parallel.dp_shard 2 make 2 ranks, but this run has 4; "
            "set parallel.dp_shard=auto or start 2",
        ),
    ],
)
def test_invalid_degrees_name_the_valid_ones(world_size: int, overrides: list[str], line: str) -> None:
    assert problems(world_size, *overrides) == (line,)


@pytest.mark.parametrize(
    ("overrides", "local_size", "node_ranks"),
    [
        (["parallel.ep=4"], 2, 2),
        (["parallel.ep=4"], 4, None),
        (["parallel.ep=4"], 1, None),
        (["parallel.ep=2"], 4, None),
        (["parallel.ep=4", "parallel.dispatch=flat"], 2, None),
        (["parallel.ep=4", "parallel.ranks_per_node=2"], 4, 2),
        (["parallel.ep=8", "parallel.dispatch=hierarchical"], 4, 4),
    ],
)
def test_tokens_travel_by_node_where_experts_span_several(
    overrides: list[str], local_size: int, node_ranks: int | None
) -> None:
    assert dispatch_node_ranks(apply_overrides(small_config(), overrides), local_size=local_size) == node_ranks


@pytest.mark.parametrize(("ep", "local_size"), [(4, 4), (4, 8), (4, 3), (1, 1)])
def test_dispatch_by_node_within_one_node_is_refused(ep: int, local_size: int) -> None:
    chosen = [f"parallel.ep={ep}", "parallel.dispatch=hierarchical"]
    with pytest.raises(ConfigError, match=rf"parallel.dispatch is hierarchical, but parallel.ep {ep} does not span"):
        dispatch_node_ranks(apply_overrides(small_config(), chosen), local_size=local_size)


@pytest.mark.parametrize("world_size", [3, 4, 12, 32])
def test_muon_takes_matrices_and_experts_however_they_are_sharded(world_size: int) -> None:
    run = resolved(world_size, "optim.matrices=muon", f"train.global_batch_tokens={32 * world_size}")
    assert run.dp_shard == world_size


def test_sequences_under_one_gather_divide_a_rank_s_microbatches() -> None:
    two = ("train.microbatch_sequences=2", "memory.sequences_per_gather=2")
    run = resolved(1, *two)
    assert (run.microbatch_sequences, run.gather_sequences, run.accumulation_steps) == (2, 4, 2)
    (problem,) = problems(1, two[0], "memory.sequences_per_gather=3")
    assert problem == (
        "memory.sequences_per_gather is 3, but must divide the 4 microbatches that a rank has in a step; valid: 1, 2, 4"
    )


def test_qk_clip_is_for_models_without_qk_norm() -> None:
    (problem,) = problems(1, "optim.qk_clip=50")
    assert problem.startswith("optim.qk_clip is 50.0, but model.qk_norm already bounds attention logits")
    assert resolved(1, "optim.qk_clip=50", "model.qk_norm=false").world_size == 1


@pytest.mark.parametrize(("tokens", "nearest"), [(100, "128"), (300, "256, 384"), (257, "256, 384"), (383, "256, 384")])
def test_a_batch_that_does_not_divide_comes_with_the_nearest_that_do(tokens: int, nearest: str) -> None:
    (problem,) = problems(4, f"train.global_batch_tokens={tokens}")
    assert problem == (
        f"train.global_batch_tokens is {tokens}, but must be a multiple of data.seq_len 32 · 4 ranks = 128; "
        f"nearest: {nearest}"
    )


@settings(deadline=None)
@given(
    world_size=st.integers(1, 12),
    per_rank=st.integers(1, 60),
    asked=st.integers(1, 70),
)
def test_the_microbatch_is_the_largest_that_divides_a_rank_s_share(world_size: int, per_rank: int, asked: int) -> None:
    run = resolved(
        world_size,
        f"train.global_batch_tokens={32 * world_size * per_rank}",
        f"train.microbatch_sequences={asked}",
        "optim.experts=adamw",
    )
    assert run.sequences_per_rank == per_rank
    assert run.global_batch_sequences == per_rank * world_size
    assert run.microbatch_sequences * run.accumulation_steps == per_rank
    assert run.microbatch_sequences <= asked
    assert not any(per_rank % larger == 0 for larger in range(run.microbatch_sequences + 1, min(asked, per_rank) + 1))


def test_lengths() -> None:
    found = problems(1, "data.seq_len=128", "optim.schedule.warmup_steps=11", "model.vocab_size=65")
    assert found == (
        "data.seq_len is 128, more than model.max_seq_len 64; set model.max_seq_len=128 or shorten the sequences",
        "optim.schedule.warmup_steps is 11, more than train.steps 10; set optim.schedule.warmup_steps=10 or less",
        "model.vocab_size is 65, but the tokenizer is trained to data.tokenizer.vocab_size 64; set both to the same",
    )
    assert resolved(1, "optim.schedule.warmup_steps=10").world_size == 1


def test_the_size_asked_of_a_tokenizer_does_not_matter_where_one_is_given() -> None:
    assert resolved(1, "model.vocab_size=65", "data.tokenizer.path=tokenizer.json").world_size == 1


def test_every_problem_is_reported_at_once() -> None:
    assert len(problems(4, "parallel.dp_replicate=3", "parallel.ep=3", "train.global_batch_tokens=100")) == 3


def test_the_vocabulary_must_be_the_tokenizer_s() -> None:
    check_vocab(small_config(), tokenizer_vocab_size=64)
    with pytest.raises(ConfigError, match=r"model.vocab_size is 64, .* has 60 tokens; set model.vocab_size=60"):
        check_vocab(small_config(), tokenizer_vocab_size=60)


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
