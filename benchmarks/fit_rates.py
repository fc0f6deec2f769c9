"""Refits everything that is learnt from published measurements, from benchmarks/published/measurements.csv.

    python -m benchmarks.fit_rates            # writes src/moesaic/cost/data/corrections.json
    python -m benchmarks.fit_rates --dry-run  # only prints the figures

Widths of the terms are those that make the observations most likely (type-II maximum likelihood), held near their
priors; they are fitted once more without each group, for cross-validation. Needs scipy; takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from moesaic.cost.corrections import Corrections, Description, Widths, alike, distances, terms, to_json
from moesaic.plan.accuracy import Priced, errors, price, rank_correlations, score, subsets
from moesaic.plan.published import read_published

HERE = Path(__file__).parent
TABLE = HERE / "published" / "measurements.csv"
DATA = HERE.parent / "src" / "moesaic" / "cost" / "data" / "corrections.json"
SCALARS = ("model", "gpu", "near", "reach", "word", "noise")
LOOSE = {"terms": 0.7, "scalars": 0.5}
"""How far a width may go from its prior, as a standard deviation of its logarithm."""


class Likelihood:
    """Negative log posterior of the widths, with its gradient, for some observations."""

    def __init__(self, d: Description, ratio: np.ndarray[Any, Any]) -> None:
        found = terms(d)
        self.names = list(found)
        self.x = np.stack([found[name][0] for name in self.names], 1)
        self.start = np.log(np.r_[[found[name][1] for name in self.names], [getattr(Widths({}), s) for s in SCALARS]])
        self.loose = np.r_[np.full(len(self.names), LOOSE["terms"]), np.full(len(SCALARS), LOOSE["scalars"])]
        same = alike(d, d)
        self.model, self.gpu = (same[name].astype(float) for name in ("model", "gpu"))
        self.along, self.differing = distances(d, d, same)
        self.ratio = ratio

    def __call__(self, theta: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        count = len(self.names)
        scale = np.exp(2 * theta[:count])
        model, gpu, near, reach, word, noise = np.exp(theta[count:])
        smooth = near**2 * np.exp(-self.along / (2 * reach**2) - self.differing / word)
        eye = np.eye(len(self.ratio))
        a = (self.x * scale) @ self.x.T + model**2 * self.model + gpu**2 * self.gpu + smooth + noise**2 * eye
        inverse = np.linalg.inv(a)
        weights = inverse @ self.ratio
        g = inverse - np.outer(weights, weights)
        gradient = np.r_[
            scale * np.einsum("if,if->f", self.x, g @ self.x),
            (g * self.model).sum() * model**2,
            (g * self.gpu).sum() * gpu**2,
            (g * smooth).sum(),
            0.5 * (g * smooth * self.along).sum() / reach**2,
            0.5 * (g * smooth * self.differing).sum() / word,
            np.trace(g) * noise**2,
        ]
        off = (theta - self.start) / self.loose
        value = 0.5 * self.ratio @ weights + 0.5 * np.linalg.slogdet(a)[1] + 0.5 * off @ off
        return float(value), gradient + off / self.loose

    def fit(self, start: np.ndarray[Any, Any] | None = None, steps: int = 80) -> np.ndarray[Any, Any]:
        start = self.start if start is None else start
        return minimize(self, start, jac=True, method="L-BFGS-B", options={"maxiter": steps}).x

    def widths(self, theta: np.ndarray[Any, Any]) -> Widths:
        values = np.exp(theta)
        named = dict(zip(self.names, map(float, values), strict=False))
        return Widths(named, *(float(v) for v in values[len(self.names) :]))


def fit(priced: Priced, *, folds: bool = True) -> Corrections:
    """Corrections for all runs, with the widths of every fold."""
    d, ratio, groups = priced.description, priced.ratio, np.array(priced.groups, dtype=object)
    whole = Likelihood(d, ratio)
    theta = whole.fit()
    made = Corrections(d, ratio, groups, whole.widths(theta), keys=priced.keys)
    if folds:
        per_group = {}
        for group in dict.fromkeys(groups):
            keep = groups != group
            part = Likelihood(d.take(keep), ratio[keep])
            per_group[group] = part.widths(part.fit(theta, 25))
        made = replace(made, folds=per_group)
    scored = score(priced, made)
    off = np.abs(scored.mean - ratio) / scored.spread
    return replace(made, stretch=float(np.quantile(off, 0.90) / 1.6449))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="print the figures, write nothing")
    parser.add_argument("--quick", action="store_true", help="one set of widths for all folds")
    parser.add_argument("--terms", action="store_true", help="print every term's coefficient and width")
    parser.add_argument("--groups", action="store_true", help="print every group's error")
    arguments = parser.parse_args()
    published = read_published(TABLE)
    priced = price(published.runs)
    for failed in priced.failed:
        print(f"not priced: {failed.id}: {failed.reason}")
    made = fit(priced, folds=not arguments.quick)
    scored = score(priced, made)
    one_out = made.leave_one_out()
    for name, mask in subsets(priced).items():
        for what, log in (
            ("closed form alone", -priced.ratio),
            ("groups left out", scored.mean - priced.ratio),
            ("rows left out", one_out - priced.ratio),
        ):
            e = errors(log[mask])
            covers = f" covers {scored.covered[mask].mean():.2f}" if what.startswith("groups") else ""
            print(
                f"{name:28s} {what:18s} n {e['rows']:3d} median {e['median']:.3f} mean {e['mean']:.3f} "
                f"p90 {e['p90']:.3f} max {e['max']:.2f}{covers}"
            )
    print(f"stretch {made.stretch:.2f}; widths {[(s, round(getattr(made.widths, s), 3)) for s in SCALARS]}")
    ranks = rank_correlations(scored)
    print("rank correlation:", ", ".join(f"{name} {value:.2f} ({count})" for name, (value, count) in ranks.items()))
    if arguments.groups:
        groups = np.array(priced.groups, dtype=object)
        for group in sorted(set(groups)):
            mask = groups == group
            log = (scored.mean - priced.ratio)[mask]
            print(
                f"  {group:36s} {mask.sum():3d} mean {errors(log)['mean']:.3f} bias {log.mean():+.3f} within {log.std():.3f}"
            )
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
