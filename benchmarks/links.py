"""moesaic and other projects over links of many speeds: one MoE layer, a training step, and the planner's predictions.

    python -m benchmarks.links --envs PEERS --budget 60             # layers: links × top-k × ranks
    python -m benchmarks.links --envs PEERS --works step            # where Megatron-Core sends for 45 % of its step
    python -m benchmarks.links --envs PEERS --works hierarchical    # 2 hosts × 2 ranks, top 8 of 64
    python -m benchmarks.links --works planner                      # 20 layouts, measured and predicted
    python -m benchmarks.links --price --logs LOGS                  # price again what is in --json
    python -m benchmarks.links --plot                               # docs/links.svg from what is in --json

Hosts are those of `benchmarks.cluster`. Candidates take turns, round after round; in a turn a candidate is built once
and then runs over every link. A setting's seconds are medians over rounds. What is in --json already stays unless it is
measured again. `--budget` stops in time: the settings that are worth most come first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import links_tables as tables
from benchmarks.cluster import Cluster, ClusterError, cluster
from benchmarks.folding import peer_names
from benchmarks.links_tables import LINKS, OURS, Measured, Setting
from benchmarks.peers.parallel.registry import PARALLEL_PEERS, Degrees, ParallelPeer, parse_degrees
from benchmarks.peers.registry import DEFAULT_ENVS
from benchmarks.peers.workload import LayerShape, StepShape, as_json
from benchmarks.rounds import ROOT
from benchmarks.teams import Plan, Team, TeamError, Teams, iterations

PEERS = ("megatron_alltoall", "megatron_allgather", "torchtitan_fp32", "hf", "deepspeed", "automodel")
LAYER_WORDS = ("alltoall", "allgather", "alltoall+inside", "allgather+inside")
HIERARCHICAL_WORDS = ("hierarchical", "hierarchical+inside")
STEP_WORDS = (
    "alltoall",
    "alltoall+experts+weight_gradients",
    "alltoall+experts+gradients",
    "alltoall+experts+weight_gradients+gradients",
    "allgather",
    "allgather+experts+gradients",
)
WARM = 2
"""Iterations over a link before those that count: memory that overlap needs is new in the first ones."""
WORKS = ("layer", "step", "hierarchical", "planner")


@dataclass(frozen=True)
class Job:
    """One workload on one layout, over several links, for several candidates; those that share it take turns."""

    work: str
    shape: LayerShape | StepShape
    degrees: Degrees
    links: tuple[str, ...]
    candidates: tuple[ParallelPeer, ...]


def candidate(words: str) -> ParallelPeer:
    """moesaic with these words of its layout."""
    return replace(PARALLEL_PEERS[OURS], name=f"{OURS} {words}", title=f"{OURS} {words}", variant=words)


def candidates(words: Sequence[str], names: Sequence[str], work: str = "layer") -> tuple[ParallelPeer, ...]:
    """Ours first, then the peers that can do this work."""
    named = (PARALLEL_PEERS[name] for name in names)
    return (*map(candidate, words), *(peer for peer in named if work in peer.works))


# ---------------------------------------------------------------- measuring


class Runner:
    """A cluster that is up, with what was measured on it."""

    def __init__(self, up: Cluster, args: argparse.Namespace, kept: list[Setting], deadline: float) -> None:
        self.up, self.args, self.kept, self.deadline = up, args, kept, deadline
        self.teams = Teams(_plan(args), up)
        self._files: dict[str, Path] = {}

    def run(self, job: Job, *, price: bool = True) -> list[Setting]:
        """Measure and price a job; one setting per link, kept in place of earlier ones that are alike."""
        settings = [
            Setting(
                job.work, link, self.up.hosts, self.up.ranks_per_host, as_json(job.shape), degrees=job.degrees.text()
            )
            for link in job.links
        ]
        print(f"{job.work}, {job.shape.text()}, {job.degrees.text()} on {self.up.hosts} hosts", flush=True)
        runnable = list(job.candidates)
        for act in (lambda team: None, Team.wait_for_imports):  # none imports beside a measurement
            for peer in list(runnable):
                try:
                    act(self.teams.get(peer, job.degrees.world))
                except TeamError as error:
                    self._fail(peer, settings, str(error), runnable)
                    self.teams.drop(peer, job.degrees.world)
        for _ in range(self.args.rounds):
            for peer in list(runnable):
                try:
                    self._turn(job, peer, settings)
                except TimeoutError:
                    self._fail(peer, settings, f"not done after {self.args.limit_seconds:g} s", runnable)
                    self.teams.mend(peer, job.degrees.world)
                except TeamError as error:
                    self._fail(peer, settings, str(error).splitlines()[0][:300], runnable)
                    self.teams.mend(peer, job.degrees.world)
        if price:
            for setting in settings:
                self.price(setting, job)
        for setting in settings:
            self.keep(setting)
            print(tables.setting_table(setting) + "\n", flush=True)
        return settings

    def _fail(self, peer: ParallelPeer, settings: list[Setting], why: str, runnable: list[ParallelPeer]) -> None:
        print(f"  {peer.name}: {why}", flush=True)
        runnable.remove(peer)
        for setting in settings:
            setting.errors[peer.name] = why

    def _turn(self, job: Job, peer: ParallelPeer, settings: list[Setting]) -> None:
        """One candidate, built once, over every link."""
        team = self.teams.get(peer, job.degrees.world)
        team.wait_for_imports()
        self.up.set_link("none")  # what is sent while it is built is not measured
        task = {
            "work": job.work,
            "shape": as_json(job.shape),
            "degrees": job.degrees.as_json(),
            "variant": peer.variant,
            "fp32_is_bf16": peer.fp32_is_bf16,
            "threads": 1,
        }
        team.begin(task)
        for setting in settings:
            self.up.set_link(setting.link)
            warm = iterations(team, WARM, self.args.limit_seconds, None)[-1]
            team.gather(30.0)
            count = max(2, min(self.args.iters, int(self.args.turn_seconds / warm)))
            before = self.up.sent()
            seconds = iterations(team, count, self.args.limit_seconds, None)
            team.gather(30.0)
            sent = sum(after - start for after, start in zip(self.up.sent(), before, strict=True))
            found = setting.found.setdefault(peer.name, Measured())
            found.seconds.append(seconds)
            found.sent.append(sent / self.up.hosts / count)
        team.end()
        said = ", ".join(f"{s.link} {s.found[peer.name].middle:.3f}" for s in settings)
        print(f"  {peer.name}: {said}", flush=True)

    def price(self, setting: Setting, job: Job) -> None:
        """What the cost model says of ours with the figures of this cluster and link."""
        from benchmarks.links_price import step_seconds

        file = self.calibrated(setting.link)
        for peer in job.candidates:
            if peer.adapter == "ours" and peer.name in setting.found:
                setting.predicted[peer.name] = step_seconds(job.shape, job.degrees, peer.variant, file)

    def calibrated(self, link: str) -> Path:
        """The cluster file of a link, measured once."""
        if link not in self._files:
            self.up.set_link(link)
            file = self.args.logs / f"{self.up.hosts}x{self.up.ranks_per_host}-{link}.toml"
            more = [] if self.args.calibrate == "full" else ["--quick"]
            print(f"  calibrating {link}", flush=True)
            self.up.torchrun(["-m", "moesaic", "calibrate", *more, "--out", str(file)], cwd=ROOT, timeout=600.0)
            self._files[link] = file
        return self._files[link]

    def keep(self, setting: Setting) -> None:
        """Put a setting among those kept, and write them."""

        def key(each: Setting) -> tuple[object, ...]:
            where = (each.work, each.link, each.hosts, each.ranks_per_host, each.degrees)
            return (*where, tuple(sorted(each.shape.items())))

        self.kept[:] = [each for each in self.kept if key(each) != key(setting)] + [setting]
        self.args.json.write_text(json.dumps([each.as_json() for each in self.kept], indent=1) + "\n")


# ---------------------------------------------------------------- what is measured


def layer_jobs(args: argparse.Namespace, ranks: int) -> Iterator[Job]:
    """A job per top-k: all links."""
    ours = LAYER_WORDS + (HIERARCHICAL_WORDS if args.ranks_per_host[0] > 1 and ranks > 2 else ())
    for topk in args.topk:
        shape = LayerShape(args.hidden, args.ffn, args.experts, topk, args.tokens)
        yield Job("layer", shape, Degrees(dp=ranks, ep=ranks), tuple(args.links), candidates(ours, args.peers))


def hierarchical_job(args: argparse.Namespace) -> Job:
    """Top 8 of 64 on 2 hosts × 2 ranks."""
    shape = LayerShape(args.hidden, args.ffn // 2, 64, 8, args.tokens)
    links = tuple(link for link in args.links if link != "2gbit")
    words = ("alltoall", "hierarchical", "hierarchical+inside", "allgather")
    return Job("layer", shape, Degrees(dp=4, ep=4), links, candidates(words, args.peers))


def step_shape(args: argparse.Namespace, topk: int, micro_batch: int = 1, layers: int = 2) -> StepShape:
    return StepShape(
        args.hidden, args.ffn, args.experts, topk, layers, heads=8, vocab=1024, seq=args.seq, batch=args.batch,
        micro_batch=micro_batch,
    )  # fmt: skip


def run_step(runner: Runner, args: argparse.Namespace) -> None:
    """A step over the link at which Megatron-Core's all-to-all is 45 % of its own."""
    ranks = runner.up.hosts * runner.up.ranks_per_host
    degrees = Degrees(dp=ranks, ep=ranks)
    names = [name for name in args.peers if name.startswith("megatron")]
    for topk in args.step_topk:
        shape = step_shape(args, topk)
        first = Job("step", shape, degrees, ("none", "200mbit"), (PARALLEL_PEERS["megatron_alltoall"],))
        found = [setting.found.get("megatron_alltoall") for setting in runner.run(first, price=False)]
        if any(each is None for each in found):
            print(f"top-{topk} is left out: Megatron-Core's all-to-all, which sets the link, did not run.")
            continue
        plain, limited = (each.middle for each in found if each is not None)
        link = tables.link_for_share(plain, limited, "200mbit", 0.45)
        print(f"Megatron-Core's all-to-all: {plain:.3f} s without a limit, {limited:.3f} s at 200mbit; at {link} 45 %")
        runner.run(Job("step", shape, degrees, (link, "none"), candidates(STEP_WORDS, names, "step")))


PLANNED = (
    ("dp2 / edp2", 1, ""),
    ("dp2 / edp2", 2, ""),
    ("dp2 / ep2", 1, "alltoall"),
    ("dp2 / ep2", 2, "alltoall"),
    ("dp2 / ep2", 1, "alltoall+inside"),
    ("dp2 / ep2", 2, "alltoall+inside"),
    ("dp2 / ep2", 1, "alltoall+experts+weight_gradients"),
    ("dp2 / ep2", 2, "alltoall+experts+weight_gradients"),
    ("dp2 / ep2", 1, "allgather"),
    ("dp2 / ep2", 1, "allgather+inside"),
)
"""Layouts, micro-batches and words of the planner's trial on two ranks; twice, with two top-ks."""


def planner_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Those that share layout and micro-batch take turns with each other."""
    for topk in args.step_topk:
        groups: dict[tuple[str, int], list[str]] = {}
        for degrees, micro, words in PLANNED:
            groups.setdefault((degrees, micro), []).append(words)
        for (degrees, micro), several in groups.items():
            shape = step_shape(args, topk, micro)
            yield Job("step", shape, parse_degrees(degrees, 2), (args.planner_link,), candidates(several, ()))


def run_works(args: argparse.Namespace, kept: list[Setting]) -> None:
    deadline = time.monotonic() + 60 * args.budget

    def on(hosts: int, per_host: int, jobs: Sequence[Job]) -> None:
        with cluster(hosts, per_host, "none") as up:
            runner = Runner(up, args, kept, deadline)
            with runner.teams:
                longest = 0.0
                for number, job in enumerate(jobs):
                    if time.monotonic() + longest > deadline:
                        print(f"out of time: {len(jobs) - number} jobs left")
                        return
                    start = time.monotonic()
                    runner.run(job)
                    longest = max(longest, time.monotonic() - start)

    for work in args.works:
        if work == "layer":
            for ranks in args.ranks:
                per_host = min(args.ranks_per_host[0], ranks // 2)
                on(ranks // per_host, per_host, list(layer_jobs(args, ranks)))
        elif work == "hierarchical":
            on(2, 2, [hierarchical_job(args)])
        elif work == "planner":
            on(2, 1, list(planner_jobs(args)))
        else:
            with cluster(2, 1, "none") as up:
                runner = Runner(up, args, kept, deadline)
                with runner.teams:
                    run_step(runner, args)


# ---------------------------------------------------------------- the command line


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.links", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--works", nargs="+", choices=WORKS, default=["layer"])
    add("--quick", action="store_true", help="a small part: two links, top 2, two ranks, one round, small sizes")
    add("--budget", type=float, default=600.0, help="minutes after which no new job begins (default 600)")
    add("--links", nargs="+", default=list(LINKS), help='as tc writes rates, or "none"')
    add("--topk", nargs="+", type=int, default=[2, 8, 4, 1])
    add("--step-topk", nargs="+", type=int, default=[4, 2])
    add("--ranks", nargs="+", type=int, default=[2, 4], help="expert-parallel ranks (default 2 4)")
    add("--ranks-per-host", nargs=1, type=int, default=[2], help="at most; there are two hosts at least (default 2)")
    add("--planner-link", default="400mbit")
    sizes = (("hidden", 512), ("ffn", 512), ("experts", 32), ("tokens", 1024), ("seq", 256), ("batch", 8))
    for name, value in sizes:
        add(f"--{name}", type=int, default=value, help=f"({value})")
    add("--peers", type=peer_names, default=list(PEERS), help=f"comma separated, of {', '.join(PARALLEL_PEERS)}")
    add("--rounds", type=int, default=3)
    add("--iters", type=int, default=5, help=f"most iterations over a link in a turn, after {WARM} that warm up")
    add("--turn-seconds", type=float, default=4.0, help="no more iterations than fit into this, but two")
    add("--limit-seconds", type=float, default=120.0)
    add("--calibrate", choices=("quick", "full"), default="quick", help="how a link's cluster file is measured")
    add("--envs", type=Path, default=DEFAULT_ENVS, help=f"the peers' environments (default {DEFAULT_ENVS})")
    add("--logs", type=Path, default=None)
    add("--json", type=Path, default=ROOT / "benchmarks" / "results" / "links.json")
    add("--plot", type=Path, nargs="?", const=ROOT / "docs" / "links.svg", help="only draw what is in --json")
    add("--price", action="store_true", help="only price again what is in --json, with the cluster files in --logs")
    add("--table", action="store_true", help="only print what is in --json")
    return options


def _plan(args: argparse.Namespace) -> Plan:
    return Plan(args.rounds, args.iters, args.turn_seconds, args.limit_seconds, envs=args.envs, logs=args.logs)


def price_again(kept: Sequence[Setting], logs: Path) -> None:
    """What the cost model says now of what was measured, with the cluster files that the run left in `logs`."""
    from benchmarks.links_price import step_seconds

    for setting in kept:
        file = logs / f"{setting.hosts}x{setting.ranks_per_host}-{setting.link}.toml"
        if not setting.predicted:
            continue
        if not file.exists():
            print(f"{setting.work} over {setting.link}: no {file}, so its prices stay")
            continue
        kind = StepShape if setting.work == "step" else LayerShape
        degrees = parse_degrees(setting.degrees, setting.ranks)
        for name in setting.predicted:
            words = name.removeprefix(OURS).strip()
            setting.predicted[name] = step_seconds(kind(**setting.shape), degrees, words, file)


def summary(kept: Sequence[Setting]) -> str:
    """All tables."""
    layers = [each for each in kept if each.work == "layer"]
    steps = [each for each in kept if each.work == "step" and tables.peers(each)]
    planned = [each for each in kept if each.work == "step" and each.predicted]
    made = [tables.sweep_table(layers), tables.crossing_table(layers)] if layers else []
    made += [tables.setting_table(each) for each in steps]
    made += [tables.planner_table(planned)] if planned else []
    return "\n\n".join(made)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    kept = [tables.from_json(each) for each in json.loads(args.json.read_text())] if args.json.exists() else []
    if args.plot is not None:
        from benchmarks.links_plot import draw

        args.plot.write_text(draw(kept))
        print(f"wrote {args.plot}")
        return 0
    if args.price:
        if args.logs is None:
            print("benchmarks.links: --price needs --logs, the folder with the run's cluster files", file=sys.stderr)
            return 2
        price_again(kept, args.logs)
        args.json.write_text(json.dumps([each.as_json() for each in kept], indent=1) + "\n")
    if args.table or args.price:
        print(summary(kept))
        return 0
    if args.quick:
        args.links, args.topk, args.step_topk, args.ranks = ["none", "200mbit"], [2], [2], [2]
        args.rounds, args.iters, args.tokens, args.hidden, args.ffn, args.batch = 1, 2, 256, 256, 256, 4
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="moesaic-links-"))
    args.logs.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        run_works(args, kept)
    except ClusterError as error:
        print(f"skipped: {error}" if not kept else f"benchmarks.links: {error}")
        return 1 if kept else 0
    print(summary(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
