"""Rules between our parameter names and the names and layouts of a Hugging Face checkpoint.

`rules(spec)` walks the model layer by layer and gives one `Rule` per tensor of `Decoder.state_dict()`. Both
directions read the same rules: `hf.load` copies disk tensors into views of ours, `hf.export` copies the views out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moesaic.hf.errors import WeightsError
from moesaic.hf.layout import (
    Alternating,
    Converter,
    Interleaved,
    Layout,
    Leading,
    Piece,
    Rows,
    Rule,
    Select,
    Transposed,
    single,
)
from moesaic.hf.naming import NAMINGS, Naming
from moesaic.spec.errors import nearest
from moesaic.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

OWN_FAMILY = "moesaic"
"""The `model_type` of architectures that no Hugging Face family covers: our names, verbatim."""

MXFP4_BLOCK = 32
"""Numbers that share one scale in the MXFP4 format."""


def naming_of(family: str) -> Naming:
    """The names of `family`.

    Raises:
        WeightsError: a family whose checkpoints are not known.
    """
    if family not in NAMINGS:
        raise WeightsError(
            f"checkpoints of model_type {family!r} cannot be read or written: "
            f"{nearest(family, [*NAMINGS, OWN_FAMILY])}."
        )
    return NAMINGS[family]


def rules(spec: ModelSpec, family: str | None = None) -> list[Rule]:
    """One rule per tensor of the model, in the order of its layers.

    Args:
        spec: the model.
        family: whose names to use; the model's own by default. `moesaic` gives our names verbatim.

    Raises:
        WeightsError: an unknown family, or a tensor of the model that the family has no name for.
    """
    family = family or spec.family
    own = family == OWN_FAMILY
    walk = _Walk(spec, Naming("MoesaicForCausalLM") if own else naming_of(family))
    walk.model()
    if own:
        return [replace(rule, layouts=((Piece(rule.name, rule.shape),),), copies=()) for rule in walk.rules]
    if walk.nameless:
        raise WeightsError(
            f"{family} checkpoints have no place for {walk.nameless[0]}"
            + (f" and {len(walk.nameless) - 1} more tensors" if len(walk.nameless) > 1 else "")
            + f", so {spec.name} can only be written with model_type {OWN_FAMILY!r}."
        )
    return walk.rules


@dataclass
class _Walk:
    """Collects the rules of one model."""

    spec: ModelSpec
    naming: Naming
    rules: list[Rule] = field(default_factory=list)
    nameless: list[str] = field(default_factory=list)
    """Tensors that the family has no name for."""

    def add(self, name: str, shape: tuple[int, ...], key: str | None, *also: str, fp32: bool = False) -> None:
        if key is None:
            self.nameless.append(name)
            key = name
        self.rules.append(single(name, shape, key, also=also, fp32=fp32))

    def norm(self, ours: str, disk: str) -> None:
        self.add(f"{ours}.weight", (self.spec.hidden,), f"{disk}.weight")
        if self.spec.norm == "layer" and self.spec.norm_bias:
            self.add(f"{ours}.bias", (self.spec.hidden,), f"{disk}.bias")

    def linear(self, ours: str, disk: str, out_width: int, in_width: int, bias: bool) -> None:
        self.add(f"{ours}.weight", (out_width, in_width), f"{disk}.weight")
        if bias:
            self.add(f"{ours}.bias", (out_width,), f"{disk}.bias")

    def model(self) -> None:
        spec = self.spec
        table = (spec.vocab, spec.hidden)
        count = len(spec.layers)
        self.add("embed.weight", table, "model.embed_tokens.weight")
        if spec.learned_positions:
            self.add("positions.weight", (spec.max_positions, spec.hidden), None)
        for i, layer in enumerate(spec.layers):
            self.layer(f"layers.{i}", f"model.layers.{i}", layer)
        self.norm("norm", "model.norm")
        if not spec.tied_embeddings:
            self.add("head.weight", table, "lm_head.weight")
        if spec.head_bias:
            self.add("head.bias", (spec.vocab,), "lm_head.bias")
        for j, layer in enumerate(spec.mtp):
            self.mtp(f"mtp.{j}", f"model.layers.{count + j}", layer)

    def mtp(self, ours: str, disk: str, layer: LayerSpec) -> None:
        """A multi-token prediction block, published as one more layer with a share of the embedding and head."""
        start, hidden = len(self.rules), self.spec.hidden
        if not self.naming.mtp:
            self.nameless.append(f"{ours}.proj.weight")
        self.norm(f"{ours}.embed_norm", f"{disk}.enorm")
        self.norm(f"{ours}.hidden_norm", f"{disk}.hnorm")
        self.add(f"{ours}.proj.weight", (hidden, 2 * hidden), f"{disk}.eh_proj.weight")
        self.layer(f"{ours}.layer", disk, layer)
        self.norm(f"{ours}.norm", f"{disk}.shared_head.norm")
        self.rules[start:] = [replace(rule, mtp=True) for rule in self.rules[start:]]
        head = "embed.weight" if self.spec.tied_embeddings else "head.weight"
        for name, copy in (("embed.weight", "embed_tokens.weight"), (head, "shared_head.head.weight")):
            at = next(i for i, rule in enumerate(self.rules) if rule.name == name)
            self.rules[at] = replace(self.rules[at], copies=(*self.rules[at].copies, f"{disk}.{copy}"))

    def layer(self, ours: str, disk: str, layer: LayerSpec) -> None:
        self.norm(f"{ours}.attn_norm", f"{disk}.input_layernorm")
        attention = self.mla if layer.attention.kind == "mla" else self.gqa
        attention(f"{ours}.attn", f"{disk}.self_attn", layer.attention)
        self.norm(f"{ours}.mlp_norm", f"{disk}.post_attention_layernorm")
        if layer.mlp is not None:
            self.mlp(f"{ours}.mlp", f"{disk}.{self.naming.dense}", layer.mlp)
        if layer.moe is not None:
            self.moe(f"{ours}.moe", disk, layer.moe)

    def gqa(self, ours: str, disk: str, attention: AttentionSpec) -> None:
        hidden, head, v_head = self.spec.hidden, attention.head_dim, attention.v_head_dim
        queries, keys = attention.heads * head, attention.kv_heads * head
        self.linear(f"{ours}.q", f"{disk}.q_proj", queries, hidden, attention.qkv_bias)
        self.linear(f"{ours}.k", f"{disk}.k_proj", keys, hidden, attention.qkv_bias)
        self.linear(f"{ours}.v", f"{disk}.v_proj", attention.kv_heads * v_head, hidden, attention.qkv_bias)
        self.linear(f"{ours}.o", f"{disk}.o_proj", hidden, attention.heads * v_head, attention.o_bias)
        if attention.qk_norm in ("head", "full"):
            whole = attention.qk_norm == "full"
            self.add(f"{ours}.q_norm.weight", (queries if whole else head,), f"{disk}.{self.naming.q_norm}.weight")
            self.add(f"{ours}.k_norm.weight", (keys if whole else head,), f"{disk}.{self.naming.k_norm}.weight")
        if attention.sinks:
            self.add(f"{ours}.sinks", (attention.heads,), f"{disk}.sinks")

    def mla(self, ours: str, disk: str, attention: AttentionSpec) -> None:
        assert attention.kv_rank is not None and attention.nope_dim is not None and attention.rope_dim is not None
        hidden, rank, q_rank = self.spec.hidden, attention.kv_rank, attention.q_rank
        queries = attention.heads * (attention.nope_dim + attention.rope_dim)
        if q_rank is None:
            self.linear(f"{ours}.q", f"{disk}.q_proj", queries, hidden, False)
        else:
            self.linear(f"{ours}.q_a", f"{disk}.q_a_proj", q_rank, hidden, attention.qkv_bias)
            self.add(f"{ours}.q_a_norm.weight", (q_rank,), f"{disk}.q_a_layernorm.weight")
            self.linear(f"{ours}.q_b", f"{disk}.q_b_proj", queries, q_rank, False)
        down = f"{disk}.kv_a_proj_with_mqa"
        self.linear(f"{ours}.kv_a", down, rank + attention.rope_dim, hidden, attention.qkv_bias)
        self.add(f"{ours}.kv_a_norm.weight", (rank,), f"{disk}.kv_a_layernorm.weight")
        keys_values = attention.heads * (attention.nope_dim + attention.v_head_dim)
        self.linear(f"{ours}.kv_b", f"{disk}.kv_b_proj", keys_values, rank, False)
        self.linear(f"{ours}.o", f"{disk}.o_proj", hidden, attention.heads * attention.v_head_dim, attention.o_bias)

    def mlp(self, ours: str, disk: str, mlp: MlpSpec) -> None:
        hidden, width = self.spec.hidden, mlp.width
        if not mlp.gated:
            self.linear(f"{ours}.up", f"{disk}.up_proj", width, hidden, mlp.bias)
        else:
            for part, tail in (("weight", (hidden,)), ("bias", ())) if mlp.bias else (("weight", (hidden,)),):
                pieces = (
                    Piece(f"{disk}.gate_proj.{part}", (width, *tail), (Rows(0, width),)),
                    Piece(f"{disk}.up_proj.{part}", (width, *tail), (Rows(width, width),)),
                )
                self.rules.append(Rule(f"{ours}.gate_up.{part}", (2 * width, *tail), (pieces,)))
        self.linear(f"{ours}.down", f"{disk}.down_proj", hidden, width, mlp.bias)

    def moe(self, ours: str, layer: str, moe: MoeSpec) -> None:
        naming, hidden, experts = self.naming, self.spec.hidden, moe.router.experts
        disk, memory = f"{layer}.{naming.block}", f"{layer}.{naming.memory_block}"
        also = {f"{memory}.{naming.memory_router or naming.router}"} - {f"{disk}.{naming.router}"}
        self.add(f"{ours}.router.weight", (experts, hidden), f"{disk}.{naming.router}", *also)
        if moe.router.logit_bias:
            self.add(f"{ours}.router.bias", (experts,), naming.router_bias and f"{disk}.{naming.router_bias}")
        if moe.router.select_bias:
            self.select_bias(f"{ours}.router.select_bias", disk, memory, experts)
        self.experts(f"{ours}.experts", disk, memory, moe)
        if moe.shared is not None:
            if naming.shared is None:
                self.nameless.append(f"{ours}.shared.down.weight")
            self.mlp(f"{ours}.shared", f"{disk}.{naming.shared}", moe.shared)
        if moe.shared_combine != "sum":
            rows = 1 if moe.shared_combine == "sigmoid_gate" else 2
            gate = naming.shared_gate if rows == 1 else None
            self.add(f"{ours}.shared_gate.weight", (rows, hidden), gate and f"{disk}.{gate}")
            if moe.shared_combine == "learned":
                self.add(f"{ours}.shared_gate.bias", (rows,), None)

    def select_bias(self, ours: str, disk: str, memory: str, experts: int) -> None:
        name = self.naming.select_bias
        if name is None or not self.naming.select_bias_leading:
            also = {f"{memory}.{name}"} - {f"{disk}.{name}"}
            self.add(ours, (experts,), name and f"{disk}.{name}", *also, fp32=True)
        else:
            piece = Piece(f"{disk}.{name}", (1, experts), (Leading(),))
            self.rules.append(Rule(ours, (experts,), ((piece,),), fp32=True))

    def experts(self, ours: str, disk: str, memory: str, moe: MoeSpec) -> None:
        kind, count, width, hidden = self.naming.experts, moe.router.experts, moe.expert.width, self.spec.hidden
        up_name, up_rows = ("gate_up", 2 * width) if moe.expert.gated else ("up", width)
        up, down = (count, up_rows, hidden), (count, hidden, width)
        if kind in ("fused_halves", "fused_interleaved"):
            up_steps: tuple[Converter, ...] = (Transposed(),) if kind == "fused_halves" else (Interleaved(),)
            up_layouts: list[Layout] = [(Piece(f"{disk}.experts.gate_up_proj", (count, hidden, up_rows), up_steps),)]
            down_layouts: list[Layout] = [
                (Piece(f"{disk}.experts.down_proj", (count, width, hidden), (Transposed(),)),)
            ]
            if kind == "fused_interleaved" and hidden % MXFP4_BLOCK == 0 and width % MXFP4_BLOCK == 0:
                blocks, half = f"{disk}.experts.%s_blocks", MXFP4_BLOCK // 2
                up_shape = (count, up_rows, hidden // MXFP4_BLOCK, half)
                down_shape = (count, hidden, width // MXFP4_BLOCK, half)
                up_layouts.append((Piece(blocks % "gate_up_proj", up_shape, (Alternating(),), mxfp4=True),))
                down_layouts.append((Piece(blocks % "down_proj", down_shape, mxfp4=True),))
        elif kind == "granite":
            up_layouts = [(Piece(f"{disk}.input_linear.weight", up),)]
            down_layouts = [(Piece(f"{disk}.output_linear.weight", down),)]
        else:
            gate_name, into, out = (
                ("gate_proj", "up_proj", "down_proj") if kind == "gate_up_down" else ("w1", "w3", "w2")
            )
            parts = ((gate_name, 0), (into, width)) if moe.expert.gated else ((into, 0),)
            up_layouts = [
                tuple(
                    Piece(f"{disk}.experts.{e}.{part}.weight", (width, hidden), (Select(e), Rows(start, width)))
                    for e in range(count)
                    for part, start in parts
                )
            ]
            down_layouts = [
                tuple(Piece(f"{disk}.experts.{e}.{out}.weight", (hidden, width), (Select(e),)) for e in range(count))
            ]
        if not kind.startswith("fused") and moe.expert.gated:
            up_layouts.append((Piece(f"{memory}.experts.gate_up_proj", up),))
            down_layouts.append((Piece(f"{memory}.experts.down_proj", down),))
        self.rules.append(Rule(f"{ours}.{up_name}", up, tuple(up_layouts)))
        self.rules.append(Rule(f"{ours}.down", down, tuple(down_layouts)))
        if moe.expert.bias:
            self.expert_biases(ours, disk, count, up_rows, up_name)

    def expert_biases(self, ours: str, disk: str, count: int, up_rows: int, up_name: str) -> None:
        up = f"{ours}.{up_name}_bias"
        if self.naming.experts == "fused_interleaved":
            piece = Piece(f"{disk}.experts.gate_up_proj_bias", (count, up_rows), (Interleaved(),))
            self.rules.append(Rule(up, (count, up_rows), ((piece,),)))
            self.add(f"{ours}.down_bias", (count, self.spec.hidden), f"{disk}.experts.down_proj_bias")
        else:
            self.add(up, (count, up_rows), None)
            self.add(f"{ours}.down_bias", (count, self.spec.hidden), None)
