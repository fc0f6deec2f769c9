"""Ring attention against a softmax over one matrix of all scores of the whole row."""

import contextlib
import functools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.mesh.group import Group
from moesaic.mesh.traffic import meter
from moesaic.model import ring, ring_blocks
from moesaic.model.attend import attend
from moesaic.model.context import all_context_places
from moesaic.model.ring import attend_in_ring
from moesaic.model.ring_plan import Block, ring_plan
from moesaic.model.sequences import Sequences
from tests.ranks import ranks

SCALE = 0.6


@dataclass(frozen=True)
class Case:
    size: int
    batch: int = 1
    length: int = 32
    heads: int = 4
    groups: int = 2
    width: int = 8
    value_width: int = 8
    window: int | None = None
    sinks: bool = False
    starts: tuple[tuple[int, ...], ...] = ()  # per row: where segments begin
    kind: str = "ring"
    dtype: torch.dtype = torch.float64
    plain: bool = False

    def segment_ids(self) -> torch.Tensor:
        ids = torch.zeros(self.batch, self.length, dtype=torch.int64)
        for row, starts in enumerate(self.starts[: self.batch]):
            for start in starts:
                ids[row, start % self.length :] += 1
        return ids

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and the output's gradient [B, S, heads, width], and sinks."""
        generator = torch.Generator().manual_seed(self.length)
        shapes = [(self.heads, self.width), (self.groups, self.width), (self.groups, self.value_width)]
        shapes.append((self.heads, self.value_width))
        rows = [torch.randn(self.batch, self.length, *shape, generator=generator) for shape in shapes]
        return [x.to(self.dtype) for x in (*rows, torch.randn(self.heads, generator=generator))]


def expected(case: Case) -> list[torch.Tensor]:
    """Output and gradients of q, k, v (and sinks) from the definition, in fp64."""
    q, k, v, grad, sinks = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in ((q, k, v, sinks) if case.sinks else (q, k, v))]
    ids, places = case.segment_ids(), torch.arange(case.length)
    distance = places[:, None] - places
    seen = (distance >= 0) & (ids[:, :, None] == ids[:, None])
    if case.window is not None:
        seen &= distance < case.window
    repeat = case.heads // case.groups
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(repeat, 2)) * SCALE
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if case.sinks:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    shares = scores.softmax(-1)[..., : case.length]
    out = torch.einsum("bhij,bjhd->bihd", shares, v.repeat_interleave(repeat, 2))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@functools.cache
def _group(size: int) -> Group:
    return Group.create("cp", [tuple(range(size))], 60)


def on_rank(rank: int, case: Case) -> tuple[list[torch.Tensor], dict, tuple[int, ...]]:
    """This rank's output and gradients, bytes sent in (forward, backward), and the plan's shifts."""
    group = _group(case.size) if case.size > 1 else Group.single("cp")
    places = all_context_places(case.length, case.size, case.kind)
    *whole, sinks = case.inputs()
    q, k, v, grad = (x[:, places[rank]].flatten(0, 1) for x in whole)
    leaves = [x.requires_grad_() for x in ((q, k, v, sinks) if case.sinks else (q, k, v))]
    plan = ring_plan(case.batch, case.segment_ids(), places, rank, window=case.window)
    patch = mock.patch.object(ring, "blocks_for", lambda *_: ring_blocks.PlainBlocks(SCALE))
    with patch if case.plain else contextlib.nullcontext():
        with meter() as forward:
            out = attend_in_ring(q, k, v, plan, group, scale=SCALE, sinks=sinks if case.sinks else None)
        with meter() as backward:
            grads = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), *grads], {"forward": dict(forward.bytes), "backward": dict(backward.bytes)}, plan.shifts


def run(case: Case) -> list:
    return [on_rank(0, case)] if case.size == 1 else ranks(case.size).run(on_rank, case)


def check(case: Case) -> list:
    answers = run(case)
    places = all_context_places(case.length, case.size, case.kind)
    bound = 1e-10 if case.dtype == torch.float64 else 1e-5
    for index, wanted in enumerate(expected(case)):
        parts = [values[index] for values, _, _ in answers]
        if index < 4:
            got = torch.empty(wanted.shape, dtype=case.dtype)
            for mine, part in zip(places, parts, strict=True):
                got[:, mine] = part.unflatten(0, (case.batch, -1))
        else:  # each rank has its own share of the sinks' gradient
            got = torch.stack(parts).sum(0)
        assert parts[0].dtype == case.dtype
        # 1 is the size of what was put in: where a gradient is a difference that vanishes, it is the measure.
        assert (got.double() - wanted).abs().max() <= bound * max(1.0, wanted.abs().max()), (index, case)
    return answers


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    batch = draw(st.integers(1, 3))
    length = 2 * size * draw(st.integers(1, 9))
    groups = draw(st.sampled_from([1, 2, 3]))
    start = st.integers(1, max(1, length - 1))
    row = st.lists(start, max_size=5, unique=True).map(tuple)
    same = draw(st.booleans())
    starts = (draw(row),) * batch if same else tuple(draw(row) for _ in range(batch))
    return Case(
        size,
        batch,
        length,
        heads=groups * draw(st.sampled_from([1, 2])),
        groups=groups,
        width=draw(st.sampled_from([1, 4, 7, 16])),
        value_width=draw(st.sampled_from([1, 4, 7, 16])),
        window=draw(st.none() | st.integers(1, length + 2)),
        sinks=draw(st.booleans()),
        starts=starts,
        kind=draw(st.sampled_from(["ring", "ring", "ulysses"])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        plain=draw(st.booleans()),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ring_equals_one_softmax_over_the_whole_row(size: int) -> None:
    @settings(max_examples=60 if size == 1 else 30, deadline=None)
    @given(cases(size))
    def holds(case: Case) -> None:
        check(case)

    holds()


@pytest.mark.parametrize(("plain", "dtype"), [(False, torch.float32), (True, torch.float64)])
@pytest.mark.parametrize("window", [None, 5, 150, 700])
def test_rows_longer_than_a_block(window: int | None, dtype: torch.dtype, plain: bool) -> None:
    # 700 tokens are more than the longest masked block; 24 and 16 are widths as MLA has them.
    starts = ((100, 103, 650), ())
    case = Case(2, 2, 1400, 4, 2, 24, 16, window, True, starts, "ring", dtype, plain)
    check(case)


def test_a_strip_of_scores_stays_below_its_limit() -> None:
    q, k, v = (torch.randn(3, 40, heads, 6, dtype=torch.float64) for heads in (4, 2, 2))
    block = Block(slice(0, 3), slice(0, 40), slice(0, 40), causal=True)
    whole = ring_blocks.PlainBlocks(SCALE).forward(q, k, v, block)
    grads = ring_blocks.PlainBlocks(SCALE).backward(whole[0], q, k, v, *whole, block)
    limit = 3 * 4 * 40 * 8
    sizes: list[int] = []
    scores_of = ring_blocks.PlainBlocks._scores

    def watched(self, *args):
        scores = scores_of(self, *args)
        sizes.append(scores.numel() * scores.element_size())
        return scores

    with (
        mock.patch.object(ring_blocks, "_SCORE_BYTES", limit),
        mock.patch.object(ring_blocks.PlainBlocks, "_scores", watched),
    ):
        torch.testing.assert_close(ring_blocks.PlainBlocks(SCALE).forward(q, k, v, block), whole)
        torch.testing.assert_close(ring_blocks.PlainBlocks(SCALE).backward(whole[0], q, k, v, *whole, block), grads)
    assert len(sizes) > 4
    assert max(sizes) <= limit


def test_bf16_is_close_to_fp32() -> None:
    for plain in (False, True):
        case = Case(1, dtype=torch.bfloat16, sinks=True, plain=plain)
        values, _, _ = on_rank(0, case)
        for got, wanted in zip(values, expected(case), strict=True):
            assert got.dtype == torch.bfloat16
            assert (got.double().view(wanted.shape) - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_the_closed_form(size: int) -> None:
    case = Case(size, batch=2, length=16 * size, value_width=5, dtype=torch.float32)
    numbers = 2 * 16 * case.groups * (case.width + case.value_width)  # keys and values of this rank
    for _, sent, shifts in check(case):
        assert shifts == tuple(range(1, size))
        once = (size - 1) * numbers * 4
        assert sent == {"forward": {("shift", "cp"): once}, "backward": {("shift", "cp"): 2 * once}}


def test_nothing_is_sent_for_documents_that_end_within_a_chunk() -> None:
    case = Case(4, length=32, starts=(tuple(range(4, 32, 4)),), dtype=torch.float32)
    for _, sent, shifts in check(case):
        assert shifts == ()
        assert sent == {"forward": {}, "backward": {}}


def test_a_short_window_needs_only_the_neighbours() -> None:
    # A chunk sees the one before it alone, which is on the rank before or the one after: two hops instead of three.
    case = Case(4, length=64, window=5, dtype=torch.float32)
    numbers = 16 * case.groups * 16
    for _, sent, shifts in check(case):
        assert shifts == (1, 3)
        assert sent["forward"] == {("shift", "cp"): 2 * numbers * 4}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_of_a_zigzag_has_the_same_number_of_scores_at_every_shift(size: int) -> None:
    length = 12 * size
    places = all_context_places(length, size, "ring")
    per_rank = []
    for rank in range(size):
        plan = ring_plan(2, None, places, rank)
        per_rank.append([sum(map(_scores_of, blocks)) for blocks in (plan.own, *plan.others)])
        assert all(block.seen is None for blocks in (plan.own, *plan.others) for block in blocks)
    assert all(counts == per_rank[0] for counts in per_rank)
    assert size * sum(per_rank[0]) == 2 * length * (length + 1) // 2


def _scores_of(block: Block) -> int:
    rows, queries, keys = (part.stop - part.start for part in (block.rows, block.queries, block.keys))
    if block.seen is not None:
        return rows * int((block.seen[1] - block.seen[0]).sum())
    return rows * (queries * (queries + 1) // 2 if block.causal else queries * keys)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]).flatmap(cases))
def test_the_blocks_of_all_ranks_hold_each_visible_pair_once(case: Case) -> None:
    places = all_context_places(case.length, case.size, case.kind)
    ids, distance = case.segment_ids(), torch.arange(case.length)[:, None] - torch.arange(case.length)
    wanted = (distance >= 0) & (distance < (case.window or case.length)) & (ids[:, :, None] == ids[:, None])
    found = torch.zeros(wanted.shape, dtype=torch.int64)
    for rank in range(case.size):
        plan = ring_plan(case.batch, ids, places, rank, window=case.window)
        for shift, blocks in zip((0, *plan.shifts), (plan.own, *plan.others), strict=True):
            for block in blocks:
                queries, keys = places[rank][block.queries], places[(rank - shift) % case.size][block.keys]
                seen = torch.ones(len(queries), len(keys), dtype=torch.int64)
                if block.causal:
                    seen = seen.tril()
                elif block.seen is not None:
                    low, high = (torch.from_numpy(x)[:, None] for x in block.seen)
                    index = torch.arange(len(keys))
                    seen = ((index >= low) & (index < high)).long()
                assert seen.any(1).all()
                for row in range(case.batch)[block.rows]:
                    found[row, queries[:, None], keys] += seen
    assert torch.equal(found, wanted.long())


def test_segments_of_sequences_are_the_segments_of_attend() -> None:
    documents = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [4] * 16])
    segments = Sequences(2, 16, None, documents).segments(chunk=6)
    ids = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments)).view(2, 16)
    q, k, v = (torch.randn(32, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    places = all_context_places(16, 1, "ring")
    plan = ring_plan(2, ids, places, 0)
    out = attend_in_ring(q, k, v, plan, Group.single("cp"), scale=SCALE)
    torch.testing.assert_close(out, attend(q, k, v, segments, scale=SCALE))


def test_only_inputs_output_and_log_sum_exp_are_kept() -> None:
    q, k, v = (torch.randn(64, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    plan = ring_plan(2, None, all_context_places(32, 1, "ring"), 0)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend_in_ring(q, k, v, plan, Group.single("cp"), scale=SCALE)
    assert sum(x.numel() for x in kept) == 64 * 8 * (4 + 2 + 2 + 4) + 64 * 4


def test_wrong_shapes_are_refused() -> None:
    places = all_context_places(16, 2, "ring")
    with pytest.raises(ValueError, match=r"segment_ids is \[1, 8\], but 2 rows have 16"):
        ring_plan(2, torch.zeros(1, 8), places, 0)
    with pytest.raises(ValueError, match="places must hold 0 … 15"):
        ring_plan(2, None, places[:, [1, 0, 2, 3, 4, 5, 6, 7]], 0)
    q = torch.zeros(8, 2, 4)
    with pytest.raises(ValueError, match="8 tokens on each of 1 ranks, but the plan is for 2 rows with 8"):
        attend_in_ring(q, q, q, ring_plan(2, None, places, 0), Group.single("cp"), scale=1.0)
