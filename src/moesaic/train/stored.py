"""The weights of a checkpoint one by one, for what must not hold a whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moesaic.train.checkpoint import CheckpointError, read_progress, read_spec
from moesaic.train.together import reason

_PREFIX = "model."


class StoredModel:
    """The model in the checkpoint `folder`, whichever ranks of whichever layout wrote it."""

    def __init__(self, folder: Path) -> None:
        """Reads what the checkpoint says of itself and of its tensors, but no tensor.

        Raises:
            CheckpointError: it cannot be read.
        """
        self.folder = folder
        self.spec = read_spec(folder)
        self.dtype: str = read_progress(folder)["dtype"]
        """In which the model was trained: `fp32` or `bf16`. Its weights may be stored wider."""
        self._reader = _Reader(folder)
        saved = self._tried(self._reader.read_metadata).state_dict_metadata
        self.outlines: dict[str, Tensor] = {
            name.removeprefix(_PREFIX): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in saved.items()
            if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        """Shape and dtype of each weight by our name, on the meta device."""

    def read(self, name: str) -> Tensor:
        """A whole weight as it is stored. Besides the result, memory holds the largest part that one rank wrote of it.

        Raises:
            CheckpointError: it is not there, or cannot be read.
        """
        if name not in self.outlines:
            raise CheckpointError(f"{self.folder} holds no weight {name}.")
        tensor = torch.empty_like(self.outlines[name], device="cpu")

        def load() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({_PREFIX + name: tensor}, storage_reader=self._reader, no_dist=True)

        self._tried(load)
        return tensor

    def _tried(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # torch reports failed reads as a BaseException
            raise CheckpointError(f"{self.folder} cannot be read: {reason(error)}.") from error


class _Reader(dcp.FileSystemReader):
    """Reads the table of a checkpoint once: it names every part that every rank wrote, and a load asks for it anew."""

    _table: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._table is None:
            self._table = super().read_metadata(*args, **kwargs)
        return self._table
