"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): extra layers that predict tokens further ahead.

Block j (counted from 1) takes the previous block's hidden state at position i and the embedding of token i + j, and
predicts token i + j + 1 with the model's own embedding and head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.mesh.mesh import Mesh
from moesaic.model.layer import Layer
from moesaic.model.linear import Linear
from moesaic.model.losses import IGNORED
from moesaic.model.norms import make_norm
from moesaic.model.router import Routing
from moesaic.model.sequences import Sequences
from moesaic.spec.model import LayerSpec, ModelSpec


class MtpBlock(nn.Module):
    """proj([norm(embedding); norm(hidden)]) → decoder layer → norm for the head.

    `proj.weight` is [D, 2 D]: columns of the embedding first, then those of the hidden state, as in the published
    checkpoints.
    """

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, *, dtype: torch.dtype, device: torch.device | str, mesh: Mesh
    ) -> None:
        super().__init__()
        hidden, eps, bias = model.hidden, model.norm_eps, model.norm_bias
        self.embed_norm = make_norm(model.norm, hidden, eps, bias, dtype=dtype, device=device)
        self.hidden_norm = make_norm(model.norm, hidden, eps, bias, dtype=dtype, device=device)
        self.proj = Linear(2 * hidden, hidden, dtype=dtype, device=device)
        self.layer = Layer(spec, model, dtype=dtype, device=device, mesh=mesh)
        self.norm = make_norm(model.norm, hidden, eps, bias, dtype=dtype, device=device)

    def forward(self, hidden_TD: Tensor, embedding_TD: Tensor, sequences: Sequences) -> tuple[Tensor, Routing | None]:
        """Previous hidden state and the embedding of the token ahead, both [T, D].

        The previous state is the model's after its final norm, or the previous block's output. Returns the normalised
        state [T, D], for the head and for the next block, and the routing.
        """
        joined = torch.cat((self.embed_norm(embedding_TD), self.hidden_norm(hidden_TD)), dim=-1)
        x_TD, routing = self.layer(self.proj(joined), sequences)
        return self.norm(x_TD), routing


def ahead(values_BS: Tensor, steps: int, fill: int, documents_BS: Tensor | None) -> Tensor:
    """values[b, i + steps] at [b, i]; `fill` past the end of the row or of the document."""
    shifted = torch.full_like(values_BS, fill)
    length = values_BS.shape[1]
    if steps >= length:
        return shifted
    shifted[:, : length - steps] = values_BS[:, steps:]
    if documents_BS is not None:
        other = documents_BS[:, steps:] != documents_BS[:, : length - steps]
        shifted[:, : length - steps].masked_fill_(other, fill)
    return shifted


def mtp_labels(labels_BS: Tensor, depth: int, documents_BS: Tensor | None) -> Tensor:
    """Labels of block `depth`: those of `depth` positions further on, none where the row or document ends before."""
    return ahead(labels_BS, depth, IGNORED, documents_BS)
