"""What crosses components: do ranks, degrees, batch and model fit together?

Arithmetic only, before anything is built. The mesh is `dp_replicate · dp_shard · cp` ranks, where
`dp_shard · cp = ep · efsdp`; every rank reads other sequences, or along `cp` other positions of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from amalthea.config.run import RunConfig
from amalthea.core.errors import ConfigError


@dataclass(frozen=True)
class ResolvedRun:
    """Degrees and batch sizes with every `auto` decided; `_sequences` count packed sequences."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ep: int
    efsdp: int
    num_data_ranks: int
    global_batch_sequences: int
    sequences_per_rank: int
    """Of one optimizer step."""
    microbatch_sequences: int
    """In one pass through a group of blocks; with `cp` the rank has its part of each."""
    gather_sequences: int
    """In all passes under one gather of a group's parameters: what the model is given at a time."""
    accumulation_steps: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.fsdp

    @property
    def fsdp(self) -> int:
        """Ranks that share one replica's parameters."""
        return self.dp_shard * self.cp

    def pass_tokens(self, seq_len: int) -> int:
        """Of this rank, in one pass through a group of blocks."""
        return self.microbatch_sequences * seq_len // self.cp

    def gather_tokens(self, seq_len: int) -> int:
        """Of this rank, in all passes under one gather."""
        return self.gather_sequences * seq_len // self.cp

    def rank_tokens(self, seq_len: int) -> int:
        """Of this rank, in one optimizer step."""
        return self.sequences_per_rank * seq_len // self.cp


def resolve(config: RunConfig, *, world_size: int) -> ResolvedRun:
    """Decide degrees and batch sizes of a run over `world_size` ranks.

    Raises:
        ConfigError: every contradiction at once, each with the values that would do.
    """
    dp_shard = _dp_shard(config, world_size)
    problems = [
        *_mesh_problems(config, world_size, dp_shard),
        *_expert_problems(config, dp_shard),
        *_batch_problems(config, world_size),
        *_context_problems(config),
        *_length_problems(config),
        *_optim_problems(config),
    ]
    if problems:
        raise ConfigError(*problems)
    assert dp_shard is not None
    global_batch_sequences = config.train.global_batch_tokens // config.data.seq_len
    num_data_ranks = world_size // config.parallel.cp
    sequences_per_rank = global_batch_sequences // num_data_ranks
    microbatch = _microbatch(config, sequences_per_rank)
    gather_sequences = microbatch * config.memory.sequences_per_gather
    return ResolvedRun(
        dp_replicate=config.parallel.dp_replicate,
        dp_shard=dp_shard,
        cp=config.parallel.cp,
        ep=config.parallel.ep,
        efsdp=dp_shard * config.parallel.cp // config.parallel.ep,
        num_data_ranks=num_data_ranks,
        global_batch_sequences=global_batch_sequences,
        sequences_per_rank=sequences_per_rank,
        microbatch_sequences=microbatch,
        gather_sequences=gather_sequences,
        accumulation_steps=sequences_per_rank // gather_sequences,
    )


def dispatch_node_ranks(config: RunConfig, *, local_size: int) -> int | None:
    """Ranks of the axis `ep` on one node where tokens travel by node, none where they go straight to ranks.

    `local_size` is the ranks that were started on this node.

    Raises:
        ConfigError: `hierarchical` was asked for, and `ep` doesn't span several whole nodes.
    """
    parallel = config.parallel
    per_node = local_size if parallel.ranks_per_node == "auto" else parallel.ranks_per_node
    spans_nodes = 1 < per_node < parallel.ep and parallel.ep % per_node == 0
    if parallel.dispatch == "hierarchical" and not spans_nodes:
        raise ConfigError(
            f"parallel.dispatch is hierarchical, but parallel.ep {parallel.ep} does not span several whole nodes of "
            f"{_ranks(per_node)}; set parallel.ep to a multiple of the ranks of a node, parallel.ranks_per_node to "
            "what a node has, or parallel.dispatch=flat"
        )
    return per_node if spans_nodes and parallel.dispatch != "flat" else None


def check_vocab(config: RunConfig, *, tokenizer_vocab_size: int) -> None:
    """Refuse a model whose vocabulary is not the tokenizer's.

    Raises:
        ConfigError: with both sizes and the override that mends it.
    """
    if config.model.vocab_size != tokenizer_vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokenizer has {tokenizer_vocab_size} "
            f"tokens; set model.vocab_size={tokenizer_vocab_size}"
        )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _dp_shard(config: RunConfig, world_size: int) -> int | None:
    """The degree, `None` where the replicas leave no whole number of ranks."""
    if config.parallel.dp_shard != "auto":
        return config.parallel.dp_shard
    shard, rest = divmod(world_size, config.parallel.dp_replicate * config.parallel.cp)
    return shard if rest == 0 else None


def _mesh_problems(config: RunConfig, world_size: int, dp_shard: int | None) -> Iterator[str]:
    replicate, cp = config.parallel.dp_replicate, config.parallel.cp
    if world_size % replicate:
        yield (
            f"parallel.dp_replicate is {replicate}, which does not divide the {_ranks(world_size)} of this run; "
            f"valid: {_list(divisors(world_size))}"
        )
    elif world_size // replicate % cp:
        yield (
            f"parallel.cp is {cp}, which does not divide the {_ranks(world_size // replicate)} of a replica; "
            f"valid: {_list(divisors(world_size // replicate))}"
        )
    elif dp_shard is not None and replicate * dp_shard * cp != world_size:
        degrees = f"parallel.dp_replicate {replicate} · parallel.dp_shard {dp_shard}"
        degrees += f" · parallel.cp {cp}" if cp > 1 else ""
        yield (
            f"{degrees} make {_ranks(replicate * dp_shard * cp)}, but this run has {world_size}; "
            f"set parallel.dp_shard=auto or start {replicate * dp_shard * cp}"
        )


def _expert_problems(config: RunConfig, dp_shard: int | None) -> Iterator[str]:
    ep, num_experts, cp = config.parallel.ep, config.model.moe.num_experts, config.parallel.cp
    fitting = [d for d in divisors(num_experts) if dp_shard is None or dp_shard * cp % d == 0]
    if ep not in fitting:
        must_divide = f"model.moe.num_experts {num_experts}"
        if dp_shard is not None:
            shards = f"parallel.dp_shard {dp_shard}" + (f" · parallel.cp {cp}" if cp > 1 else "")
            must_divide = f"both {shards} and {must_divide}"
        yield f"parallel.ep is {ep}, but must divide {must_divide}; valid: {_list(fitting)}"
    chunks = config.parallel.dispatch_chunks
    if ep == 1 and chunks > 1:
        yield (
            f"parallel.dispatch_chunks is {chunks}, but with parallel.ep 1 no token travels to its experts; "
            "set parallel.dispatch_chunks=1 or raise parallel.ep"
        )


def _context_problems(config: RunConfig) -> Iterator[str]:
    cp, heads, kv_heads = config.parallel.cp, config.model.num_heads, config.model.num_kv_heads
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        fitting = [d for d in divisors(heads) if kv_heads % d == 0 or d % kv_heads == 0]
        yield (
            f"parallel.cp is {cp}, but must divide model.num_heads {heads}, and divide model.num_kv_heads {kv_heads} "
            f"or be a multiple of it; valid: {_list(fitting)}"
        )
    if config.data.seq_len % cp:
        yield (
            f"parallel.cp is {cp}, but must divide data.seq_len {config.data.seq_len}; "
            f"valid: {_list(divisors(config.data.seq_len))}"
        )


def _batch_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    data_ranks = max(1, world_size // config.parallel.cp)
    tokens, unit = config.train.global_batch_tokens, config.data.seq_len * data_ranks
    if tokens % unit:
        below = tokens // unit * unit
        nearest = [below, below + unit] if below else [unit]
        yield (
            f"train.global_batch_tokens is {tokens}, but must be a multiple of data.seq_len "
            f"{config.data.seq_len} · {_ranks(data_ranks)} = {unit}; nearest: {_list(nearest)}"
        )
        return
    sequences_per_rank = tokens // unit
    passes = sequences_per_rank // _microbatch(config, sequences_per_rank)
    if passes % config.memory.sequences_per_gather:
        yield (
            f"memory.sequences_per_gather is {config.memory.sequences_per_gather}, but must divide the {passes} "
            f"microbatches that a rank has in a step; valid: {_list(divisors(passes))}"
        )


def _microbatch(config: RunConfig, sequences_per_rank: int) -> int:
    return max(d for d in divisors(sequences_per_rank) if d <= config.train.microbatch_sequences)


def _optim_problems(config: RunConfig) -> Iterator[str]:
    if config.optim.qk_clip is not None and config.model.qk_norm:
        yield (
            f"optim.qk_clip is {config.optim.qk_clip}, but model.qk_norm already bounds attention logits and the clip "
            "would change nothing; set model.qk_norm=false or optim.qk_clip=none"
        )


def _length_problems(config: RunConfig) -> Iterator[str]:
    if config.data.seq_len > config.model.max_seq_len:
        yield (
            f"data.seq_len is {config.data.seq_len}, more than model.max_seq_len {config.model.max_seq_len}; "
            f"set model.max_seq_len={config.data.seq_len} or shorten the sequences"
        )
    warmup, steps = config.optim.schedule.warmup_steps, config.train.steps
    if warmup > steps:
        yield (
            f"optim.schedule.warmup_steps is {warmup}, more than train.steps {steps}; "
            f"set optim.schedule.warmup_steps={steps} or less"
        )
    trained = config.data.tokenizer.vocab_size
    if config.data.tokenizer.path is None and config.model.vocab_size != trained:
        yield (
            f"model.vocab_size is {config.model.vocab_size}, but the tokenizer is trained to "
            f"data.tokenizer.vocab_size {trained}; set both to the same"
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
