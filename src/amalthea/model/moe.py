"""Mixture of experts: router, stacked experts, shared experts.

The router scores every token against every expert by a sigmoid, adds the load-balance bias to *choose*, and
weights by the scores without it. The bias is a buffer that training moves once per optimizer step from the counts
which the forward pass returns; nothing is counted by side effect, so recompute cannot count twice.

Shape legend: B sequences, S tokens per sequence, T = B·S tokens, D hidden, E experts, K choices per token,
F expert hidden, N = T·K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from amalthea.core.tensors import local_tensor
from amalthea.kernels.grouped import grouped_linear
from amalthea.kernels.permute import sort_by_expert, sum_to_tokens, to_rows, to_rows_twice
from amalthea.kernels.router import router_logits
from amalthea.kernels.saved import Held, held_linear, hold
from amalthea.kernels.swiglu import swiglu, weighted_swiglu
from amalthea.model.config import MoEConfig


class Routing(NamedTuple):
    """`experts` int64 [T, K] and fp32 `weights` [T, K] of each token's choices; `losses` fp32 [2]."""

    experts: torch.Tensor
    weights: torch.Tensor
    losses: torch.Tensor
    """Balance loss and z-loss, each summed over tokens and multiplied by its coefficient."""


class Router(nn.Module):
    """Chooses K of E experts for each token. Computed in fp32 whatever the model's dtype."""

    bias: torch.Tensor

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(config.num_experts, dtype=torch.float32))
        # Over the ranks that share a sequence; context parallelism sets it.
        self.sequence_sum: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> Routing:
        """x [B, S, D]. Source: DeepSeek-V3 (arXiv 2412.19437) eq. 12-20; ST-MoE (arXiv 2202.08906) eq. 5."""
        config = self.config
        logits = router_logits(x, self.weight)
        scores = logits.sigmoid()
        experts = (scores.detach() + self.bias).topk(config.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.normalize_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        losses = self._losses(logits, scores, experts)
        return Routing(experts.flatten(0, 1), (weights * config.route_scale).flatten(0, 1), losses)

    def _losses(self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        config = self.config
        balance = z_loss = logits.new_zeros(())
        if config.aux_loss_coef:
            # Load share of each expert in its sequence, 1 where balanced: no gradient, so counts suffice.
            chosen = experts.flatten(1)
            load = torch.zeros_like(scores[:, 0]).scatter_add_(1, chosen, scores.new_ones(chosen.shape))
            if self.sequence_sum is not None:
                load = self.sequence_sum(load)
            share = load * (config.num_experts / load.sum(dim=1, keepdim=True))
            affinity = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).sum(dim=1)
            balance = config.aux_loss_coef * (share * affinity).sum()
        if config.z_loss_coef:
            z_loss = config.z_loss_coef * logits.logsumexp(dim=-1).square().sum()
        return torch.stack((balance, z_loss))


Rows = tuple[torch.Tensor, torch.Tensor]
"""The same rows for two products, whose gradients `to_rows_twice` adds on their way back."""


class Experts(nn.Module):
    """A stack of SwiGLU experts. Under expert parallelism it holds this rank's experts."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.expert_hidden_size, hidden_size)
        self.w_gate = nn.Parameter(torch.empty(shape))
        self.w_up = nn.Parameter(torch.empty(shape))
        self.w_down = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.fuse = True

    def inner(
        self, rows: Rows, weights: torch.Tensor, ends: torch.Tensor, *, also: Sequence[torch.Tensor] = ()
    ) -> Inner:
        """All but the last product: rows [N, D] sorted by expert, named twice, weights fp32 [N], ends int32 [experts].

        The routing weight is applied to the hidden activation: the same product, on F instead of D columns. Holds what
        `down` needs, and `also`, so that recompute can end here.
        """
        gate = grouped_linear(rows[0], local_tensor(self.w_gate), ends=ends)
        up = grouped_linear(rows[1], local_tensor(self.w_up), ends=ends)
        hidden = weighted_swiglu(gate, up, weights.to(gate.dtype), fuse=self.fuse)
        (hidden, weight), held = hold((hidden, local_tensor(self.w_down)), (ends, *also))
        return Inner(hidden, weight, ends, held)


class Inner(NamedTuple):
    """Experts before their last product: hidden [N, F], its weight [local experts, D, F], ends, and what holds them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    ends: torch.Tensor
    held: Held | None

    def down(self) -> torch.Tensor:
        """The last product, [N, D]."""
        held = None if self.held is None else self.held[:3]
        return grouped_linear(self.hidden, self.weight, ends=self.ends, held=held)

    def also(self, start: int, stop: int) -> Held | None:
        """What holds a part of what `also` named."""
        return None if self.held is None else self.held[3 + start : 3 + stop]


class SharedExperts(Protocol):
    """Experts that every token visits."""

    def inner(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """All but the last product of x [T, D], with what that needs held; what is returned makes it, [T, D]."""
        ...


class Dispatcher(Protocol):
    """Takes tokens to their experts and brings the weighted sum back."""

    def __call__(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: SharedExperts | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, D] → ([T, D], int64 counts [E] of this rank's choices).

        What `shared` makes of x is added. Everything but last products comes first, so that recompute, which ends with
        the last thing that backward needs, ends before them and whatever follows them.
        """
        ...


class LocalDispatcher:
    """All experts are on this rank: sort, compute, sum. Never waits for the device."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __call__(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: SharedExperts | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared_down = None if shared is None else shared.inner(x)
        order, place, counts = sort_by_expert(routing.experts, self.num_experts)
        rows = to_rows_twice(x, order=order, place=place, fuse=experts.fuse)
        weights = to_rows(routing.weights.reshape(-1, 1), order=order, place=place)[:, 0]
        inner = experts.inner(rows, weights, counts.cumsum(0).to(torch.int32), also=(order,))
        top_k = routing.experts.shape[1]
        out = sum_to_tokens(inner.down(), order=order, place=place, top_k=top_k, held=inner.also(0, 1))
        return out if shared_down is None else out + shared_down(), counts


class SwiGLU(nn.Module):
    """Dense feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(hidden_size, inner_size, bias=False)
        self.w_up = nn.Linear(hidden_size, inner_size, bias=False)
        self.w_down = nn.Linear(inner_size, hidden_size, bias=False)
        self.fuse = True

    def inner(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """All but the last product of x [T, D]; what is returned makes it, [T, D], and needs nothing saved."""
        hidden = swiglu(self.w_gate(x), self.w_up(x), fuse=self.fuse)
        (hidden, weight), held = hold((hidden, self.w_down.weight))
        return lambda: held_linear(hidden, weight, held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x […, D]."""
        return self.inner(x.flatten(0, -2))().view_as(x)


class MoE(nn.Module):
    """Routed experts plus shared ones. `dispatcher` is replaced by expert parallelism."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.dispatcher: Dispatcher = LocalDispatcher(config.num_experts)
        self.shared: SwiGLU | None = None
        if config.num_shared_experts:
            self.shared = SwiGLU(hidden_size, config.num_shared_experts * config.expert_hidden_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, S, D] → output [B, S, D], counts int64 [E], router losses fp32 [2]."""
        routing = self.router(x)
        out, counts = self.dispatcher(x.flatten(0, 1), routing, self.experts, self.shared)
        return out.view_as(x), counts, routing.losses
