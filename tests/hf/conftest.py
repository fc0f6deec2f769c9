"""Makes the oracle and the tiny models importable by the tests of this folder, and runs them on one thread.

Tensors this small only lose by being split, and threads that spin for each other cost more than the tests.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
