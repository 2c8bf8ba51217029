"""A tensor of which each rank holds blocks, at any offsets.

A DTensor says the same for regular splits. Optimizer state that lies with a unit's owning replica is not regular: a
rank may hold three experts of one stack and none of the next. Distributed checkpoints only need to know the blocks,
and restore them into any other division; the three dunder methods are how torch's planners ask for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Piece:
    """A block of the whole tensor: `tensor` begins at `offsets`."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


class Pieces(torch.Tensor):
    """The blocks that this rank holds of a tensor of global `shape`, sharing memory with their user.

    Together the ranks' blocks cover the tensor; equal blocks of several ranks are copies of each other. It is a tensor
    in name only (shape and dtype, for the planners): no operation runs on it.
    """

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> Pieces:
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)  # type: ignore[attr-defined]
        self.pieces = tuple(pieces)
        return self

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise TypeError(f"{func} was called on Pieces, which only names blocks; use its pieces")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Pieces({tuple(self.shape)}, {self.dtype}, {len(self.pieces)} blocks)"

    def detach(self) -> Pieces:
        return self

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(piece.tensor), size=self.shape
                ),
            )
            for chunk, piece in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(piece.tensor for piece in self.pieces if torch.Size(piece.offsets) == index.offset)
