"""A rank's piece of a model is what it would have cut out of the whole import, and little else is read for it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS
from torch import Tensor

from moesaic.hf import WeightsError, export_tensors, import_weights, rules, safetensors_io
from moesaic.hf.blocks import blocks_of
from moesaic.hf.layout import Alternating, Converter, Interleaved, Leading, Piece, Rows, Select, Transposed
from moesaic.hf.load import plan_import
from moesaic.mesh.cut import Cut
from moesaic.mesh.cut import Piece as Part
from moesaic.model.decoder import Decoder
from moesaic.spec.families import load_model_spec
from moesaic.spec.model import ModelSpec
from tests.meshes import layouts_by_share, mesh_of

BY_NAME = {tiny.name: tiny for tiny in TINY_MODELS}
GPT_OSS_MXFP4 = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


def spec_of(name: str, **changes: object) -> ModelSpec:
    tiny = BY_NAME[name]
    return load_model_spec({"model_type": tiny.model_type, **tiny.config, **changes})


def written(spec: ModelSpec, folder: Path) -> dict[str, Tensor]:
    """Random weights of a model, as they stand in `folder`."""
    generator = torch.Generator().manual_seed(3)
    whole = {rule.name: torch.randn(rule.shape, generator=generator) for rule in rules(spec)}
    export_tensors(spec, whole, folder)
    return whole


def cut_for(name: str, shape: tuple[int, ...], parts: tuple[int, ...], index: int) -> Cut:
    """Piece `index` of `parts` along each dimension, experts and width at once; gate and up are cut apart."""
    joined = {"gate_up.weight": 0, "gate_up.bias": 0, "experts.gate_up": 1, "experts.gate_up_bias": 1}
    halves = next((dim for end, dim in joined.items() if name.endswith(end)), None)
    pieces = [
        Part(dim, count, (index + dim) % count, 2 if dim == halves else 1)
        for dim, count in enumerate(parts[: len(shape)])
        if count > 1
    ]
    return Cut(shape, tuple(pieces))


def assert_pieces(folder: Path, spec: ModelSpec, whole: dict[str, Tensor], cuts: dict[str, Cut]) -> None:
    local = {name: torch.full(cut.local_shape, 7.0) for name, cut in cuts.items()}
    plan_import(folder, spec).fill(local, cuts=cuts)
    for name, tensor in local.items():
        assert torch.equal(tensor, cuts[name].take(whole[name])), f"{name} {cuts[name]}"


@pytest.mark.parametrize("name", [tiny.name for tiny in TINY_MODELS])
@pytest.mark.parametrize("parts", [(3, 2, 1), (2, 1, 3)])
def test_pieces_of_every_family(name: str, parts: tuple[int, ...], tmp_path: Path) -> None:
    spec = spec_of(name)
    whole = written(spec, tmp_path / "m")
    for index in range(max(parts)):
        cuts = {key: cut_for(key, tuple(tensor.shape), parts, index) for key, tensor in whole.items()}
        assert_pieces(tmp_path / "m", spec, whole, cuts)


@pytest.mark.parametrize("skipped", [0, 1 << 20])
@pytest.mark.parametrize("name", ["granitemoe", "gpt_oss", "llama4_text", "qwen3_moe"])
def test_pieces_read_through_a_small_buffer(
    name: str, skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries larger than the buffer, or worth skipping parts of, are read one by one."""
    spec = spec_of(name)
    whole = written(spec, tmp_path / "m")
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", 256)
    monkeypatch.setattr(safetensors_io, "SKIPPED_BYTES", skipped)
    cuts = {key: cut_for(key, tuple(tensor.shape), (2, 3, 2), 1) for key, tensor in whole.items()}
    assert_pieces(tmp_path / "m", spec, whole, cuts)


def test_pieces_of_fp8(tmp_path: Path) -> None:
    """Blocks of scales that no cut respects."""
    spec = spec_of("deepseek_v3")
    written(spec, tmp_path)
    generator = torch.Generator().manual_seed(4)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in [pair for pair in stored.items() if "_proj" in pair[0]]:
        rows, columns = tensor.shape
        stored[name] = tensor.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 12), generator=generator) + 0.5
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 12]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_like_whole(tmp_path, spec)


def test_pieces_of_mxfp4(tmp_path: Path) -> None:
    spec = spec_of("gpt_oss", **GPT_OSS_MXFP4)
    written(spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for part, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        key = f"model.layers.0.mlp.experts.{part}"
        experts = stored.pop(key).shape[0]
        size = (experts, rows, columns // 32)
        stored[f"{key}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
        stored[f"{key}_scales"] = torch.randint(118, 130, size, dtype=torch.uint8, generator=generator)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    assert_like_whole(tmp_path, spec)


def assert_like_whole(folder: Path, spec: ModelSpec) -> None:
    whole = {rule.name: torch.empty(rule.shape) for rule in rules(spec)}
    plan_import(folder, spec).fill(whole)
    for parts in ((2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 3, 2)):
        for index in range(max(parts)):
            cuts = {key: cut_for(key, tuple(tensor.shape), parts, index) for key, tensor in whole.items()}
            assert_pieces(folder, spec, whole, cuts)


Steps = tuple[Converter, ...]
CONVERTERS: list[tuple[tuple[int, ...], Steps]] = [
    ((5, 3), ()),
    ((4, 6, 5), (Select(2), Rows(3, 3))),
    ((6, 5), (Rows(0, 3),)),
    ((3, 4, 5), (Transposed(),)),
    ((3, 8, 5), (Interleaved(),)),
    ((3, 8), (Interleaved(),)),
    ((3, 8, 5), (Alternating(),)),
    ((4,), (Leading(),)),
    ((1, 8, 5), (Interleaved(),)),
    ((3, 2, 5), (Interleaved(),)),
    ((3, 8, 1), (Alternating(),)),
    ((1, 1), (Transposed(),)),
]


@given(st.data(), st.sampled_from(CONVERTERS))
@settings(max_examples=150, deadline=None)
def test_blocks_are_the_cut_of_the_view(data: st.DataObject, case: tuple[tuple[int, ...], Steps]) -> None:
    """Against numbering the elements: whatever is cut and whichever rows of the cut are wanted, each number of the
    piece's view that lies there comes to its place, and nothing else is touched."""
    shape, steps = case
    numbers = torch.arange(prod(shape)).view(shape)
    piece = Piece("x", (), steps)
    disk = piece.view(numbers)
    parts = []
    for dim, size in enumerate(shape):
        count = data.draw(st.integers(1, 3))
        segments = data.draw(st.sampled_from([1, 2])) if size % 2 == 0 else 1
        parts.append(Part(dim, count, data.draw(st.integers(0, count - 1)), segments))
    cut = Cut(shape, tuple(parts))
    rows = cut.local_shape[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    mine = cut.take(numbers)[start:stop]
    local = torch.full(mine.shape, -1)
    view_shape, blocks = blocks_of(piece, shape, local, cut.boxes(start, stop))
    assert view_shape == tuple(disk.shape)
    for block in blocks:
        assert block.target.shape == disk[block.slices].shape and block.target.numel()
        assert (block.target == -1).all(), "an element is filled twice"
        block.target.copy_(disk[block.slices])
    inside = torch.isin(mine, disk)
    assert torch.equal(local, torch.where(inside, mine, -1))


def test_only_local_experts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the experts of one layer of a pipeline stage: their tensors and no others, each once and whole."""
    spec = spec_of("qwen3_moe")
    written(spec, tmp_path / "m")
    shapes = {rule.name: rule.shape for rule in rules(spec)}
    cuts = {
        f"layers.1.moe.experts.{part}": Cut(shapes[f"layers.1.moe.experts.{part}"], (Part(0, 2, 1),), expert=True)
        for part in ("gate_up", "down")
    }
    found = read_of(monkeypatch, tmp_path / "m", spec, cuts)
    names = [f"experts.{e}.{part}_proj.weight" for e in (3, 4, 5) for part in ("gate", "up", "down")]
    assert found == {f"model.layers.1.mlp.{name}": 4 * 20 * 40 for name in names}


@pytest.mark.parametrize(("name", "key"), [("granitemoe", "block_sparse_moe.input_linear.weight"),
                                           ("gpt_oss", "mlp.experts.gate_up_proj")])  # fmt: skip
def test_of_a_stack_only_local_experts_are_read(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked on disk, with the width cut too: the rows of the local experts, once."""
    spec = spec_of(name)
    written(spec, tmp_path / "m")
    ours = "layers.1.moe.experts.gate_up"
    shape = next(rule.shape for rule in rules(spec) if rule.name == ours)
    cut = Cut(shape, (Part(0, 2, 0), Part(1, 2, 1, 2)), expert=True)
    found = read_of(monkeypatch, tmp_path / "m", spec, {ours: cut})
    experts = cut.local_shape[0]
    assert experts < shape[0]
    assert found == {f"model.layers.1.{key}": 4 * experts * shape[1] * shape[2]}
    monkeypatch.setattr(safetensors_io, "SKIPPED_BYTES", 0)
    again = read_of(monkeypatch, tmp_path / "m", spec, {ours: cut})
    if name == "granitemoe":  # whose width is not the last axis on disk, so that skipping pays
        assert again == {f"model.layers.1.{key}": 4 * prod(cut.local_shape)}


def read_of(monkeypatch: pytest.MonkeyPatch, folder: Path, spec: ModelSpec, cuts: dict[str, Cut]) -> Counter[str]:
    """Bytes read of each tensor on disk."""
    found: Counter[str] = Counter()
    real = safetensors_io._read_bytes

    def watch(entry: safetensors_io.Entry, name: str, start: int, out: Tensor) -> None:
        found[name] += out.numel() * out.element_size()
        real(entry, name, start, out)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_io, "_read_bytes", watch)
        local = {name: torch.empty(cut.local_shape) for name, cut in cuts.items()}
        report = plan_import(folder, spec).fill(local, cuts=cuts)
    assert report.tensors == len(found)
    assert report.bytes == sum(4 * tensor.numel() for tensor in local.values())
    return found


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    spec = spec_of("mixtral")
    written(spec, tmp_path / "m")
    plan = plan_import(tmp_path / "m", spec)
    name, table = "embed.weight", (spec.vocab, spec.hidden)
    with pytest.raises(WeightsError, match=r"embed.weight has shape \[97, 40\] here, and its cut .* has \[49, 40\]"):
        plan.fill({name: torch.empty(table)}, cuts={name: Cut(table, (Part(0, 2, 0),))})
    with pytest.raises(WeightsError, match=r"embed.weight of the model has shape \[98, 40\]"):
        plan.fill({name: torch.empty(49, 40)}, cuts={name: Cut((98, 40), (Part(0, 2, 0),))})
    with pytest.raises(WeightsError, match="does not fill 1 tensor"):
        plan.fill({"layers.9.norm": torch.empty(1)}, cuts={})
    with pytest.raises(WeightsError, match=r"has no .* to fill"):
        plan.fill({name: torch.empty(table)})


@pytest.mark.parametrize("name", ["mixtral-window-tied", "qwen3_moe", "deepseek_v3", "granitemoe"])
def test_every_rank_of_a_layout_imports_its_share(name: str, tmp_path: Path) -> None:
    """All legal layouts of four ranks that differ in what a rank holds: each rank has what it would have cut out, and
    the different pieces together are the whole."""
    spec = spec_of(name, **({"num_nextn_predict_layers": 1} if name == "deepseek_v3" else {}))
    assert bool(spec.mtp) == (name == "deepseek_v3")
    whole = written(spec, tmp_path / "m")
    layouts = list(layouts_by_share(spec, 4))
    assert len(layouts) > 4
    for layout, ranks in layouts:
        held: dict[str, dict[Cut, int]] = defaultdict(dict)
        for rank in ranks:
            decoder = Decoder(spec, mesh=mesh_of(layout, rank))
            import_weights(tmp_path / "m", decoder)
            for key, tensor in decoder.state_dict().items():
                cut = decoder.cuts.get(key, Cut(tuple(tensor.shape)))
                assert torch.equal(tensor, cut.take(whole[key])), f"{key} of rank {rank} of {layout}"
                held[key][cut] = tensor.numel()
        found = {key: sum(sizes.values()) for key, sizes in held.items()}
        assert found == {key: tensor.numel() for key, tensor in whole.items()}, str(layout)
