"""Host memory gives back the bytes that were sent there, and its room is used again."""

from __future__ import annotations

from pathlib import Path

import torch

from moesaic.mesh.host_memory import HostMemory


def test_bytes_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    host = HostMemory(tmp_path)
    sent = [torch.randn(7, 33), torch.randint(-9, 9, (100_000,)), torch.randn(50, 3).bfloat16(), torch.empty(0, 4)]
    places = [host.reserve(x.numel() * x.itemsize) for x in sent]
    for done in [host.send(x, place) for x, place in zip(sent, places, strict=True)]:
        done.wait()
    for x, place in zip(sent, places, strict=True):
        back = torch.empty_like(x)
        host.bring(place, back).wait()
        assert torch.equal(back, x)
        assert torch.equal(host.copy(place, x.shape, x.dtype), x)
    assert not list(tmp_path.iterdir())  # the file has no name
    assert host.moved == 2 * sum(x.numel() * x.itemsize for x in sent)


def test_room_that_is_given_back_is_used_again(tmp_path: Path) -> None:
    host = HostMemory(tmp_path)
    first = host.reserve(100_000)
    room = host.bytes
    assert 100_000 <= room <= 100_000 * 9 // 8
    host.release(first)
    assert host.reserve(99_990) == first
    assert host.bytes == room
    assert host.reserve(99_990) != first
