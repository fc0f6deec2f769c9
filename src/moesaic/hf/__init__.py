"""Hugging Face checkpoints, in and out.

`mapping.rules(spec)` says where each tensor lies on disk; `load` and `export` move tensors by those rules; `folder`
does whole models.
"""

from moesaic.hf.errors import WeightsError
from moesaic.hf.export import Exported, Source, export_tensors
from moesaic.hf.folder import export_decoder, import_weights, load_decoder
from moesaic.hf.load import Imported, import_tensors
from moesaic.hf.mapping import rules

__all__ = [
    "Exported",
    "Imported",
    "Source",
    "WeightsError",
    "export_decoder",
    "export_tensors",
    "import_tensors",
    "import_weights",
    "load_decoder",
    "rules",
]
