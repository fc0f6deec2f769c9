"""Dispatchers over libraries, with a stand-in for the library: what is asked of it, and parity with one process."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from moesaic.dispatch import LIBRARIES, deepep, hybridep, library, make_dispatcher
from moesaic.mesh.group import Group
from moesaic.mesh.mesh import ExpertGroups
from moesaic.spec.errors import SpecError
from tests.dispatch import fake_deep_ep
from tests.dispatch.test_dispatchers import Case, alone, expert_groups, on_a_rank, random_ids
from tests.ranks import ranks

NAMES = ["deepep", "hybridep"]


@contextlib.contextmanager
def package(found: types.ModuleType | None) -> Iterator[None]:
    """What `import deep_ep` finds."""
    # Only this key: patching all of sys.modules would forget what else is imported meanwhile.
    sys.modules["deep_ep"] = found  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


@contextlib.contextmanager
def fake(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """The stand-in in place of the library, on CPU, for rows of another dtype too."""
    with (
        package(fake_deep_ep),
        mock.patch.object(library.LibraryDispatcher, "device", "cpu"),
        mock.patch.object(fake_deep_ep, "row_dtype", dtype),
        mock.patch.dict(library._NAMES, {dtype: "bf16"}),
    ):
        yield


def with_fake(rank: int, case: Case, name: str, staged: bool) -> dict[str, Any]:
    """As `on_a_rank`, with the stand-in on CPU; also what was waited for and called, and the buffers made."""
    deepep._buffers.clear()
    hybridep._buffers.clear()
    fake_deep_ep.waits.clear()
    fake_deep_ep.HybridEPBuffer.calls.clear()
    fake_deep_ep.Buffer.made = fake_deep_ep.HybridEPBuffer.made = 0
    with fake(case.dtype):
        found = on_a_rank(rank, case, name, staged)
    kind = fake_deep_ep.Buffer if name == "deepep" else fake_deep_ep.HybridEPBuffer
    sms = {buffer.sms for buffer in hybridep._buffers.values()} or {fake_deep_ep.Buffer.num_sms}
    calls = list(fake_deep_ep.HybridEPBuffer.calls or fake_deep_ep.waits)
    return found | {"calls": calls, "made": kind.made, "sms": sms}


def sparse(ep: int, tokens: list[int], top_k: int, dtype: torch.dtype = torch.float32, **keys: Any) -> Case:
    return Case(ep, 1, 8, random_ids(tokens, 8, top_k), top_k, hidden=16, dtype=dtype, **keys)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "case",
    [sparse(2, [9, 4], 3), sparse(2, [0, 6], 1, apply="input"), sparse(4, [3, 0, 9, 5], 4), sparse(2, [130, 5], 2)],
    ids=["2", "empty", "4", "many"],
)
def test_results_are_those_of_alltoall_and_of_one_process(case: Case, name: str, staged: bool) -> None:
    found = ranks(case.size).run(with_fake, case, name, staged)
    flat = ranks(case.size).run(on_a_rank, case, "alltoall", staged)
    expected = alone(case)
    each_has = case.experts // case.ep
    for rank, (each, other) in enumerate(zip(found, flat, strict=True)):
        rows = sum(i // each_has == rank for ids in case.ids for token in ids for i in token)
        assert each["rows"] == (other["rows"] if name == "deepep" else rows)
        for key in ("y", "x", "weights"):
            torch.testing.assert_close(each[key], other[key], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(each[key], expected[key][rank], rtol=1e-5, atol=1e-5)
        for key, value in each["parameters"].items():
            torch.testing.assert_close(value, other["parameters"][key], rtol=1e-5, atol=1e-5)
            whole = each["cuts"][key].take(expected["parameters"][key])
            torch.testing.assert_close(value, whole, rtol=1e-5, atol=1e-5)


def test_nobody_has_a_token() -> None:
    for name in NAMES:
        for each in ranks(2).run(with_fake, sparse(2, [0, 0], 2), name, False):
            assert each["rows"] == 0 and each["y"].shape == (0, 16)
            assert all(not value.any() for value in each["parameters"].values())


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16(name: str) -> None:
    """Rows are rounded to 8 bits once for each expert or rank, so results are to about 1 %."""
    case = sparse(2, [9, 4], 3, torch.bfloat16)
    expected = alone(case)
    for rank, each in enumerate(ranks(2).run(with_fake, case, name, True)):
        for key in ("y", "x", "weights"):
            wanted = expected[key][rank].float()
            assert float((each[key].float() - wanted).norm() / wanted.norm()) < 1e-2
        # Forward out and back; backward of combine over the layout that is known, and backward of dispatch.
        assert each["calls"] == ["dispatch", "combine", "cached dispatch", "combine"]
        assert each["made"] == 1
        assert each["sms"] == ({20} if name == "deepep" else {16})


def test_another_lane_gets_the_wait_before_the_stream_does() -> None:
    order: list[str] = []
    event = mock.Mock(current_stream_wait=lambda: order.append("stream"))
    sent = library.Sent(event, torch.zeros(1, 2), ())
    with mock.patch.object(library, "before_wait", lambda work, rows: order.append("lane")):
        assert sent.wait() is sent.rows
    assert order == ["lane", "stream"]


def test_buffers_are_kept_and_grow() -> None:
    """The second message is larger than what the first one's buffers had to hold."""
    for each in ranks(2).run(twice):
        assert each == (1, 640, 640)


def twice(rank: int) -> tuple[int, int, int]:
    """HybridEP buffers made by two dispatches, the tokens that they hold then, and those of the second y."""
    hybridep._buffers.clear()
    fake_deep_ep.HybridEPBuffer.made = 0
    with fake():
        dispatcher = make_dispatcher("hybridep", expert_groups(2, 1), 8)
        for tokens in (3, 640 - rank):
            x_TD = torch.ones(tokens, 16, dtype=torch.bfloat16)
            here = dispatcher.dispatch(x_TD, torch.arange(tokens)[:, None] % 8, torch.ones(tokens, 1))
            y_TD = dispatcher.combine(here.rows_RD, here.handle)
    (buffer,) = hybridep._buffers.values()
    assert torch.equal(y_TD, x_TD)
    return fake_deep_ep.HybridEPBuffer.made, buffer.tokens, len(y_TD) + rank


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_and_sizes_are_refused(name: str) -> None:
    bf16 = "'(deepep|hybridep)' sends bf16 rows, and tokens are fp64: use train.dtype \"bf16\" or the dispatcher hier"
    with fake(), pytest.raises(SpecError, match=bf16):
        LIBRARIES[name].check("cpu", "fp64")
    with fake():
        dispatcher = make_dispatcher(name, groups(2, 1), 8)
        assert isinstance(dispatcher, library.LibraryDispatcher)
        with pytest.raises(SpecError, match=r"rows of a multiple of (8|16) numbers, and the hidden size is 12: use"):
            dispatcher.check_rows(torch.zeros(1, 12, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_is_refused(name: str) -> None:
    with (
        package(fake_deep_ep),
        pytest.raises(SpecError, match="runs on NVIDIA GPUs, and tokens are on cpu: use the dispatcher hierarchical"),
    ):
        LIBRARIES[name].check("cpu", "bf16")


def groups(ep: int, etp: int) -> ExpertGroups:
    single = Group.single("edp")
    return ExpertGroups(
        Group("ep", tuple(range(ep)), 0),
        Group("etp", tuple(range(etp)), 0),
        single,
        Group("ep_etp", tuple(range(ep * etp)), 0),
        single,
        single,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_and_cut_experts_are_refused(name: str) -> None:
    with (
        package(None),
        pytest.raises(SpecError, match=r"needs the package deep_ep.*deepseek-ai/DeepEP or use the dispatcher hier"),
    ):
        make_dispatcher(name, groups(2, 1), 4)
    with (
        package(types.ModuleType("deep_ep")),
        pytest.raises(SpecError, match=r"needs deep_ep.*Buffer, which this build of deep_ep lacks: install it from"),
    ):
        make_dispatcher(name, groups(2, 1), 4)
    with fake(), pytest.raises(SpecError, match="brings tokens to whole experts, and etp is 2: use etp 1 or"):
        make_dispatcher(name, groups(2, 2), 4)


def test_group_sizes_that_deepep_lacks_are_refused() -> None:
    with fake():
        dispatcher = make_dispatcher("deepep", groups(3, 1), 6)
        object.__setattr__(dispatcher.ep, "handle", object())  # type: ignore[attr-defined]
        with pytest.raises(SpecError, match=r"no configuration for ep 3 \(Unsupported number of EP ranks: 3\): use"):
            dispatcher.buffer(torch.zeros(1, 16))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("domain", "experts", "part"),
    [
        ("3", 8, "is '3', not a divisor of ep = 4"),
        ("8", 8, "is '8', not a divisor of ep = 4"),
        ("all", 8, "is 'all', not a divisor of ep = 4"),
        ("2", 4, "2 · 1 = 2: use another ep"),
    ],
)
def test_an_nvlink_domain_that_cannot_be_is_refused(domain: str, experts: int, part: str) -> None:
    with fake(), mock.patch.dict("os.environ", {hybridep.DOMAIN: domain}):
        with pytest.raises(SpecError) as refused:
            make_dispatcher("hybridep", groups(4, 1), experts)
        assert part in str(refused.value)
    with fake(), mock.patch.dict("os.environ", {hybridep.DOMAIN: "2"}):
        make_dispatcher("hybridep", groups(4, 1), 8)
