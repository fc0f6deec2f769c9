"""A rank's part of the training state, as checkpoints see it.

On disk every tensor is whole: it has one name and one shape, and lies there as boxes. What a rank saves and reads are
the boxes that it holds. So a checkpoint does not know the layout that wrote it, and any layout reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from moesaic.mesh.cut import Box, Cut
from moesaic.mesh.group import Group


class Shards(Tensor):
    """The boxes of a whole tensor of `shape` that lie in `local`; there may be none.

    It stands in a state dict where the whole tensor would, with the whole's shape, and answers what
    torch.distributed.checkpoint asks a sharded tensor (torch.distributed._checkpointable). Nothing can be computed with
    it. Ranks that hold the same box write it once. Reading fills `local`.

    Raises ValueError unless every element of `local` is in just one box, within the whole.
    """

    local: Tensor
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], local: Tensor, boxes: Sequence[Box]) -> Shards:
        made: Shards = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        return made

    def __init__(self, shape: Sequence[int], local: Tensor, boxes: Sequence[Box]) -> None:
        self.local = local.detach()
        self.boxes = tuple(boxes)
        held = sum(math.prod(box.sizes) for box in self.boxes)
        if held != local.numel():
            raise ValueError(f"The boxes hold {held} elements and the local tensor {local.numel()}.")
        for box in self.boxes:
            spans = zip(box.offsets, box.sizes, box.place, self.shape, local.shape, strict=True)
            if any(offset + n > whole or place + n > here for offset, n, place, whole, here in spans):
                raise ValueError(f"{box} does not fit into {tuple(self.shape)} or {tuple(local.shape)}.")
        self._by_offset = {box.offsets: box for box in self.boxes}

    def copy_to_cpu(self) -> Shards:
        """The same boxes with a copy of their elements in main memory."""
        return Shards(self.shape, self.local.to("cpu", copy=True), self.boxes)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch leaves its own untyped
        return f"Shards({tuple(self.shape)}, {len(self.boxes)} boxes, local {tuple(self.local.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # as above
        raise NotImplementedError(f"{func} on Shards: compute with the local tensor.")

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._by_offset[tuple(index.offset)].of(self.local)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def shards_of(parts: Mapping[str, tuple[Cut, Tensor, tuple[int, int] | None]]) -> dict[str, Shards]:
    """The Shards of each name's (Cut, local tensor, rows).

    The Cut says which piece of the whole this rank's model has; `rows` = (start, stop) which rows of that piece (along
    dimension 0) the local tensor holds where data-parallel ranks share it, None for all. Moments and masters are cut
    like their parameter.
    """
    return {
        name: Shards(cut.shape, local, cut.boxes() if rows is None else cut.boxes(*rows))
        for name, (cut, local, rows) in parts.items()
    }


def rng_entry(rng: dict[str, Tensor], group: Group) -> dict[str, Any]:
    """What stands under `rng` in the state to save: the generators' states, under the rank's number if it has
    company."""
    return dict(rng) if group.size == 1 else {str(group.rank): dict(rng)}


def rng_to_read(
    folder: Path, saved_names: Collection[str], rng: dict[str, Tensor], group: Group
) -> tuple[dict[str, Any], list[str]]:
    """What to put under `rng` in the state to read, so that reading fills the tensors of `rng` that were saved for this
    rank; and a sentence for what was not and stays as it is.

    Every rank draws from generators of its own, so their states mean nothing when the number of ranks has changed.
    """
    saved = [name.split(".") for name in saved_names if name.startswith("rng.")]
    world = len({parts[1] for parts in saved if len(parts) == 3}) or 1
    if world != group.size:
        count = {True: "one process", False: f"{world} processes"}[world == 1]
        return {}, [
            f"{folder} was written by {count} and is read by {group.size}: random numbers are drawn anew from the seed."
        ]
    own = {parts[-1] for parts in saved if world == 1 or parts[1] == str(group.rank)}
    elsewhere = [name for name in rng if name not in own]
    notes = []
    if elsewhere:
        notes.append(
            f"{folder} was written on another kind of device: {', '.join(elsewhere)} draws anew from the seed."
        )
    return rng_entry({name: state for name, state in rng.items() if name in own}, group), notes
