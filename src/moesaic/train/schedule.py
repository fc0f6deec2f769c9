"""The learning rate of each step: a linear warm-up, then a cosine, a plateau with a decay at the end, or a constant."""

from __future__ import annotations

import math

from moesaic.spec.tables import TrainTable


def learning_rate(step: int, keys: TrainTable) -> float:
    """The learning rate of step `step`, counted from 1 to `keys.steps`.

    Warm-up: lr · step / warmup_steps. Then, with p running from 0 to 1 over the rest,
    `cosine`: from lr to min_lr = lr · min_lr_ratio along half a cosine (arXiv 1608.03983, eq. 5);
    `wsd`: lr until the last `decay_fraction` of all steps, there lr falls to min_lr as 1 − √p (arXiv 2405.18392, §3);
    `constant`: lr.
    """
    if step <= keys.warmup_steps:
        return keys.lr * step / keys.warmup_steps
    floor = keys.lr * keys.min_lr_ratio
    if keys.schedule == "cosine":
        progress = (step - keys.warmup_steps) / max(1, keys.steps - keys.warmup_steps)
        return floor + (keys.lr - floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    if keys.schedule == "wsd" and keys.decay_fraction:
        decay_steps = max(1, round(keys.decay_fraction * keys.steps))
        progress = (step - (keys.steps - decay_steps)) / decay_steps
        return floor + (keys.lr - floor) * (1 - math.sqrt(min(1.0, max(0.0, progress))))
    return keys.lr
