"""Refits everything that is learnt from published measurements, from benchmarks/published/measurements.csv.

    python -m benchmarks.fit_rates            # writes src/moesaic/cost/data/corrections.json
    python -m benchmarks.fit_rates --dry-run  # only prints the figures

Few numbers are fitted: a factor on the widths of each block of terms, and the widths and reach of what models,
accelerators and near runs have in common. They are those that best predict groups and rows that are left out; for
cross-validation they are fitted again without each fifth of the groups. Needs scipy; takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from moesaic.cost.corrections import (
    BLOCKS,
    NINE_IN_TEN,
    Corrections,
    Description,
    Widths,
    alike,
    block_of,
    distances,
    terms,
    to_json,
)
from moesaic.plan.accuracy import Priced, errors, price, rank_correlations, score, subsets
from moesaic.plan.published import read_published

HERE = Path(__file__).parent
TABLE = HERE / "published" / "measurements.csv"
DATA = HERE.parent / "src" / "moesaic" / "cost" / "data" / "corrections.json"
SCALARS = ("model", "gpu", "pair", "near", "reach", "word", "noise")
START = {"shares": 6.0, "stack": 0.5, "links": 0.35, "sizes": 0.3}
"""Where the factors on the priors of blocks start: rates of parts may be off by much, effects of sizes are small. These
and the defaults of `Widths` were chosen by hand on all groups; what is fitted stays near them."""
LOOSE = 0.15
"""How far a scale may go from its start, as a standard deviation of its logarithm."""
FOLDS = 5


class Score:
    """How well widths predict: groups left out, and single rows left out, from one matrix.

    Both follow from the inverse covariance: the residual of rows g left out is (A⁻¹)gg⁻¹ (A⁻¹ y)g. The score is that of
    a Student distribution, so that single rows that are off do not rule it; each group counts by the root of its rows.
    """

    def __init__(self, d: Description, ratio: np.ndarray[Any, Any], groups: np.ndarray[Any, Any]) -> None:
        found = terms(d)
        self.prior = {name: width for name, (_, width) in found.items()}
        same = alike(d, d)
        self.grams = []
        for block in BLOCKS:
            x = np.stack([found[n][0] * found[n][1] for n in found if block_of(n) == block], 1)
            self.grams.append(x @ x.T)
        self.same = [same["model"], same["gpu"], same["model"] & same["gpu"]]
        self.along, self.differing = distances(d, d, same)
        self.ratio, self.experts = ratio, d.numbers["moe"]
        self.places = [np.flatnonzero(groups == group) for group in dict.fromkeys(groups)]
        self.start = np.log([*(START[block] for block in BLOCKS), *[getattr(Widths({}), name) for name in SCALARS]])

    def left_out(self, scales: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """(residual, spread) of groups left out and (residual, spread) of rows left out, [N] each."""
        values = np.exp(scales)
        blocks, (model, gpu, pair, near, reach, word, noise) = values[: len(BLOCKS)], values[len(BLOCKS) :]
        a = sum(scale**2 * gram for scale, gram in zip(blocks, self.grams, strict=True))
        a = a + sum(width**2 * same for width, same in zip((model, gpu, pair), self.same, strict=True))
        a = a + near**2 * np.exp(-self.along / (2 * reach**2) - self.differing / word)
        inverse = np.linalg.inv(a + noise**2 * np.eye(len(self.ratio)))
        weights, diagonal = inverse @ self.ratio, np.diag(inverse)
        residual, variance = np.zeros(len(self.ratio)), np.zeros(len(self.ratio))
        for place in self.places:
            inner = np.linalg.inv(inverse[np.ix_(place, place)])
            residual[place], variance[place] = inner @ weights[place], np.diag(inner)
        return residual, np.sqrt(variance), weights / diagonal, 1 / np.sqrt(diagonal)

    def __call__(self, scales: np.ndarray[Any, Any]) -> float:
        residual, spread, one, one_spread = self.left_out(scales)
        value = 0.5 * float((((scales - self.start) / LOOSE) ** 2).sum())
        score = np.log(spread) + 2.5 * np.log1p((residual / spread) ** 2 / 4)
        for place in self.places:
            value += (3.0 if self.experts[place[0]] else 1.0) * np.sqrt(min(len(place), 16)) * score[place].mean()
        return value + 0.3 * float((np.log(one_spread) + 2.5 * np.log1p((one / one_spread) ** 2 / 4)).sum())

    def fit(self, start: np.ndarray[Any, Any] | None = None, calls: int = 400) -> np.ndarray[Any, Any]:
        """The scales with the best score near `start`."""
        start = self.start if start is None else start
        simplex = np.r_[start[None], start[None] + np.eye(len(start)) * 0.5]
        options = {"maxfev": calls, "xatol": 0.02, "fatol": 0.05, "initial_simplex": simplex, "adaptive": True}
        return minimize(self, start, method="Nelder-Mead", options=options).x

    def widths(self, scales: np.ndarray[Any, Any]) -> Widths:
        """The widths that scales stand for."""
        factor = dict(zip(BLOCKS, np.exp(scales), strict=False))
        named = {name: float(width * factor[block_of(name)]) for name, width in self.prior.items()}
        return Widths(named, *(float(v) for v in np.exp(scales[len(BLOCKS) :])))


def fit(priced: Priced, *, folds: int = FOLDS, calls: int = 400) -> Corrections:
    """Corrections for all runs. The widths that predict a group were fitted without it, and without the fifth of all
    groups that it belongs to."""
    d, ratio, groups = priced.description, priced.ratio, np.array(priced.groups, dtype=object)
    whole = Score(d, ratio, groups)
    scales = whole.fit(calls=calls)
    made = Corrections(d, ratio, groups, whole.widths(scales), keys=priced.keys)
    names = sorted(set(groups), key=lambda g: (-int((groups == g).sum()), g))
    per_group: dict[str, Widths] = {}
    for fold in range(folds):
        out = names[fold::folds]
        keep = ~np.isin(groups.astype(str), out)
        part = Score(d.take(keep), ratio[keep], groups[keep])
        per_group |= dict.fromkeys(out, part.widths(part.fit(scales, calls // 2)))
    made = replace(made, folds=per_group)
    # What ships is stretched by all residuals; `score` stretches each fold by those of the others.
    ends = (np.abs(mean - ratio) / spread for mean, spread in (made.leave_one_out(), made.left_out()))
    return replace(made, stretch=tuple(float(np.quantile(end, 0.90) / NINE_IN_TEN) for end in ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="print the figures, write nothing")
    parser.add_argument("--quick", action="store_true", help="one set of widths for all folds, and few calls")
    parser.add_argument("--terms", action="store_true", help="print every term's coefficient and width")
    parser.add_argument("--groups", action="store_true", help="print every group's error")
    arguments = parser.parse_args()
    published = read_published(TABLE)
    priced = price(published.runs)
    for failed in priced.failed:
        print(f"not priced: {failed.id}: {failed.reason}")
    made = fit(priced, folds=0, calls=150) if arguments.quick else fit(priced)
    scored = score(priced, made)
    one_out, one_spread = made.leave_one_out()
    for name, mask in subsets(priced).items():
        for what, log in (
            ("closed form alone", -priced.ratio),
            ("groups left out", scored.mean - priced.ratio),
            ("rows left out", one_out - priced.ratio),
        ):
            e = errors(log[mask])
            spread = one_spread if what.startswith("rows") else scored.spread
            covers = f" covers {(np.abs(log) <= NINE_IN_TEN * spread)[mask].mean():.2f}" if "left out" in what else ""
            print(
                f"{name:28s} {what:18s} n {e['rows']:3d} median {e['median']:.3f} mean {e['mean']:.3f} "
                f"p90 {e['p90']:.3f} max {e['max']:.2f}{covers}"
            )
    scales = {
        block: made.widths.terms[n] / terms(made.seen)[n][1] for n in made.widths.terms for block in [block_of(n)]
    }
    print("stretch", made.stretch, "scales", {block: round(scale, 2) for block, scale in scales.items()})
    print("widths", {name: round(getattr(made.widths, name), 3) for name in SCALARS})
    ranks = rank_correlations(priced, scored.seconds)
    print("rank correlation:", ", ".join(f"{name} {value:.2f} ({count})" for name, (value, count) in ranks.items()))
    if arguments.groups:
        groups = np.array(priced.groups, dtype=object)
        for group in sorted(set(groups)):
            mask = groups == group
            log = (scored.mean - priced.ratio)[mask]
            figures = f"mean {errors(log)['mean']:.3f} bias {log.mean():+.3f} within {log.std():.3f}"
            print(f"  {group:36s} {mask.sum():3d} {figures}")
    if arguments.terms:
        found = terms(made.seen)
        _, weights = made._solved
        for name, width in made.widths.terms.items():
            print(f"  {name:32s} width {width:.3f} coefficient {width**2 * found[name][0] @ weights:+.3f}")
    if not arguments.dry_run:
        DATA.parent.mkdir(exist_ok=True)
        text = json.dumps(to_json(made), ensure_ascii=False, separators=(",", ":"))
        DATA.write_text(text.replace("],[", "],\n["), encoding="utf-8")
        print(f"wrote {DATA.name}, {len(text) // 1024} KiB")


if __name__ == "__main__":
    main()
