"""The ceiling: plain products of the experts' sizes as if all rows belonged to one expert, into memory that is reused.

A layer of T·K rows makes nine products of 2·T·K·D·F FLOPs each, forward and backward. Here they are nine times the same
[R, D]·[D, F], so nothing is gathered, split or allocated.
"""

from __future__ import annotations

import time

import torch

from benchmarks.peers.workload import LayerShape

IMPORTS = ()


def rate(shape: LayerShape, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """FLOP/s, and FLOPs per second of processor time times the number of threads.

    Of the better of the two layouts (A·B and A·Bᵀ), all nine products where they fit in about `seconds`. Where they do
    not (bf16 on a CPU without bf16 instructions) rows are left out: the rate is that of fewer rows.
    """
    rows, repeats = shape.tokens * shape.topk, 9
    best = best_by_cpu = 0.0
    for transposed in (False, True):
        n = min(rows, 128)  # to see how slow it is before the whole product is tried
        while True:
            a = torch.randn(n, shape.hidden).to(dtype)
            b = torch.randn(shape.ffn, shape.hidden).to(dtype)
            b = b.t() if transposed else b.t().contiguous()
            out = torch.empty(n, shape.ffn, dtype=dtype)
            count = repeats if n == rows else 1
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                torch.mm(a, b, out=out)
            took, cpu = time.perf_counter() - start, time.process_time() - cpu
            flops = 2 * n * shape.hidden * shape.ffn * count
            best = max(best, flops / took)
            if took > 0.01:  # processor time is not counted more finely everywhere
                best_by_cpu = max(best_by_cpu, flops / cpu * torch.get_num_threads())
            if n == rows or took > seconds / 8:
                break
            n = rows if took * rows / n * repeats < 2 * seconds else min(rows, 4 * n)
    return best, best_by_cpu
