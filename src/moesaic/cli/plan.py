"""`moesaic plan`: which layout to run on which machines, how fast it will be, and how sure that is."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from moesaic.plan.around import Change, Why
    from moesaic.plan.result import Candidate, PlanResult
    from moesaic.plan.search import Question
    from moesaic.spec.cluster import ClusterSpec

FRAMEWORKS = ("megatron", "megascale", "torchtitan", "moesaic")
EXTRAS = ("graphs", "padded")
MEASURED_GPUS = 1536
"""The most accelerators of runs with experts that docs/accuracy.md reports on."""


def plan(
    source: Annotated[
        str,
        typer.Argument(help="Preset, run file (TOML), config.json, or its folder.", metavar="MODEL"),
    ],
    gpus: Annotated[int | None, typer.Option(min=1, max=2**20, help="Accelerators in all.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Accelerator by name, or a TOML file of one's own cluster [default: h100]", metavar="NAME|FILE"
        ),
    ] = None,
    network: Annotated[
        Literal["efa"] | None, typer.Option(help="What joins nodes where it is no InfiniBand or RoCE.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence [default: 4096]")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step [default: 4 per accelerator]")
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"] | None, typer.Option(help="Of the matmuls [default: bf16]")
    ] = None,
    stack: Annotated[
        str,
        typer.Option(
            help=f"Software: {', '.join(FRAMEWORKS)}, with a release as in megatron:26.06, +graphs (CUDA graphs) and "
            "+padded (rows of experts padded or dropped to a capacity)."
        ),
    ] = "megatron",
    memory_headroom: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of an accelerator's memory to leave free.")
    ] = 0.05,
    imbalance: Annotated[float, typer.Option(min=1.0, help="Rows of the most loaded expert rank over the mean.")] = 1.0,
    moments: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="Precision of the optimizer's moments; the run file's, else fp32."),
    ] = None,
    mtp: Annotated[bool, typer.Option(help="Train the model's multi-token prediction blocks.")] = True,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Layouts to show.")] = 10,
    fewest_gpus: Annotated[
        bool, typer.Option("--fewest-gpus", help="Find the smallest cluster, up to --gpus, that fits.")
    ] = False,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Explain one layout, also an illegal or too large one: its degrees, or a whole row as printed here.",
        ),
    ] = None,
    around: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="List single changes to a layout by their gain.")
    ] = None,
    launch: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Write launch files of the best layout (or of --why's).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the launch files.")] = Path("launch"),
    html: Annotated[Path | None, typer.Option(help="Write a page to look at.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the best layout's step for Perfetto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search all legal layouts of a model on a cluster for the fastest that fits.

    Times come with an interval that holds nine measurements in ten, from the errors of past predictions.
    """
    from dataclasses import replace

    from moesaic.plan.around import changes
    from moesaic.plan.around import why as explain
    from moesaic.plan.search import search
    from moesaic.spec.errors import SpecError, nearest

    if why is not None and around is not None:
        raise SpecError("--why and --around ask two things: give one of them.")
    if (why is not None or around is not None) and (html is not None or trace is not None):
        raise SpecError("--html and --trace show the best layout of a search: leave --why and --around out.")
    if launch is not None:
        from moesaic.plan.launch import TARGETS

        if launch not in TARGETS:
            raise SpecError(f"There is no launch target {launch!r}: {nearest(launch, TARGETS)}")
        _check_folder("--out", out)
    for option, file in (("--html", html), ("--trace", trace)):
        if file is not None:
            _check_file(option, file)
    question = _question(
        source, gpus, gpu, network, seq_len, global_batch, precision, stack, memory_headroom, imbalance, moments, mtp,
        top, whole=not fewest_gpus,
    )  # fmt: skip
    if fewest_gpus:
        question = _fewest(question, quiet=as_json)
    if why is not None or around is not None:
        text = why if why is not None else str(around)
        answer = explain(question, text, count=top if around is None else 2 * top)
        if around is not None and answer.candidate is None:
            raise SpecError(f"{text} is not legal: {answer.illegal}")
        if launch is not None and answer.candidate is None:
            raise SpecError(f"{text} is not legal, so there is nothing to launch: {answer.illegal}")
        if around is not None:
            assert answer.candidate is not None
            # Of a layout that does not fit, the answer keeps only the changes that make it fit.
            found = answer.changes if answer.fits else changes(question, answer.candidate)[: 2 * top]
            print(json.dumps(_around_json(answer, found), indent=2)) if as_json else _show_around(answer, found)
        else:
            print(json.dumps(_why_json(answer), indent=2, ensure_ascii=False)) if as_json else _show_why(
                answer, question
            )
        if launch is not None:
            assert answer.candidate is not None
            _launch(launch, question, answer.candidate, out)
        return
    result = search(question, (lambda line: None) if as_json else (lambda line: print(line, file=sys.stderr)))
    result = replace(result, notes=(*result.notes, *_beyond(question)))
    if html is not None:
        html.write_text(_page(question, result), encoding="utf-8")
    if trace is not None:
        from moesaic.plan.steps import step_picture
        from moesaic.report.trace import write_trace

        picture = step_picture(question.work, question.cluster, question.stack, result.layouts[0])
        write_trace(picture.timeline, trace)
        print(
            f"{picture.shown} of {picture.micro_batches} micro-batches in {trace}: open it in ui.perfetto.dev",
            file=sys.stderr,
        )
    if launch is not None:
        _launch(launch, question, result.layouts[0], out)
    if as_json:
        print(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    else:
        _show(result)


def _question(
    source: str,
    gpus: int | None,
    gpu: str | None,
    network: str | None,
    seq_len: int | None,
    global_batch: int | None,
    precision: str | None,
    stack: str,
    headroom: float,
    imbalance: float,
    moments: str | None,
    mtp: bool,
    top: int,
    whole: bool,
) -> Question:
    from moesaic.cost.compute import computes
    from moesaic.cost.workload import PRECISIONS, Workload
    from moesaic.plan.search import Question
    from moesaic.spec.errors import SpecError
    from moesaic.spec.families import load_model_spec
    from moesaic.spec.run import load_run

    file = Path(source)
    master: Literal["fp32", "split"] = "fp32"
    if source.endswith(".toml"):
        run = load_run(file)
        model = run.model_spec()
        seq_len = seq_len or run.train.seq_len
        global_batch = global_batch or run.train.global_batch
        precision = precision or run.train.dtype
        moments, master = moments or run.train.moment_dtype, run.train.master
        cluster = _run_cluster(run, gpu, gpus)
    else:
        model = load_model_spec(source)
        cluster = _cluster(gpu, gpus)
    if network is not None:
        cluster = cluster.model_copy(update={"network": network})
    if not computes(cluster.gpu, precision or "bf16"):  # type: ignore[arg-type]
        can = ", ".join(name for name in PRECISIONS if computes(cluster.gpu, name))
        raise SpecError(f"{cluster.gpu.name} has no {precision or 'bf16'} matmuls: it can do {can}.")
    length = seq_len or min(4096, model.max_positions)
    if model.learned_positions and length > model.max_positions:
        raise SpecError(f"--seq-len {length} is more than the {model.max_positions} positions that {model.name} has.")
    work = Workload(
        model,
        length,
        global_batch or 4 * cluster.gpus,
        precision=precision or "bf16",  # type: ignore[arg-type]
        mtp=mtp and bool(model.mtp),
        imbalance=imbalance,
        moment_bytes=2 if moments == "bf16" else 4,
        master=master if (precision or "bf16") != "fp32" else "fp32",
    )
    return Question(work, cluster, _stack(stack), headroom=headroom, top=top)


def _run_cluster(run: Any, gpu: str | None, gpus: int | None) -> ClusterSpec:
    """The cluster of a run file; --gpu and --gpus stand above its [cluster]."""
    from moesaic.spec.cluster import cluster_of, load_cluster

    table = run.cluster
    if table.gpu is None or gpu is not None:
        return _cluster(gpu or table.gpu, gpus or run.world)
    if gpus is not None:
        return load_cluster(table.gpu, gpus, gpus_per_node=table.gpus_per_node)
    cluster = cluster_of(table, run.world) if table.nodes is not None or run.world is not None else None
    return cluster or _cluster(table.gpu, None)


def _cluster(gpu: str | None, gpus: int | None) -> ClusterSpec:
    from moesaic.spec.cluster import load_cluster
    from moesaic.spec.errors import SpecError

    if gpu is not None and gpu.endswith(".toml") and not Path(gpu).is_file():
        raise SpecError(f"--gpu {gpu!r}: there is no such file of a cluster; docs/hardware.md shows what one holds.")
    if gpus is None and (gpu is None or not gpu.endswith(".toml")):
        raise SpecError("How many accelerators? Give --gpus N (with --fewest-gpus, the most there may be).")
    return load_cluster(gpu or "h100", gpus)


def _stack(text: str) -> Any:
    from moesaic.cost.rates import Stack
    from moesaic.spec.errors import SpecError, nearest

    name, *extras = text.split("+")
    framework, colon, release = name.partition(":")
    if framework not in FRAMEWORKS:
        raise SpecError(f"--stack {framework!r}: {nearest(framework, FRAMEWORKS)}")
    if colon and not re.fullmatch(r"v?\d+(\.\w+)+", release):
        raise SpecError(f"--stack {text!r}: {release!r} is no release; give its numbers, as in {framework}:26.06.")
    for extra in extras:
        if extra not in EXTRAS:
            raise SpecError(f"--stack {text!r} ends in +{extra}, but only +graphs and +padded are known.")
    return Stack(framework=framework, release=release, graphs="graphs" in extras, padded="padded" in extras)


def _check_file(option: str, file: Path) -> None:
    """Refuses a file that could not be written, before a search rather than after it."""
    from moesaic.spec.errors import SpecError

    if file.is_dir():
        raise SpecError(f"{option} {str(file)!r} is a folder: give a file.")
    if not file.parent.is_dir():
        raise SpecError(f"{option} {str(file)!r}: there is no folder {str(file.parent)!r}.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise SpecError(f"{option} {str(file)!r} may not be written.")


def _check_folder(option: str, folder: Path) -> None:
    """Refuses a folder that could not be made or written to."""
    from moesaic.spec.errors import SpecError

    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise SpecError(f"{option} {str(folder)!r}: {str(there)!r} is no folder that may be written to.")


def _beyond(question: Question) -> list[str]:
    """Notes on what published runs do not cover."""
    found, gpus, release = [], question.cluster.gpus, question.stack.release
    if gpus > MEASURED_GPUS:
        found.append(
            f"{gpus:,} accelerators are beyond the {MEASURED_GPUS:,} that published runs with experts cover: what "
            f"changes with scale is not in the interval"
        )
    if release and not re.match(r"2\d\.\d\d\b", release):
        found.append(f"release {release} tells no date (26.06 would): taken as the newest")
    return found


def _fewest(question: Question, quiet: bool) -> Question:
    from dataclasses import replace

    from moesaic.plan.search import fewest_gpus
    from moesaic.spec.errors import SpecError

    most = question.cluster.gpus
    found = fewest_gpus(question, most)
    if found is None:
        raise SpecError(
            f"{question.work.model.name} fits on no number of {question.cluster.gpu.name} up to {most} with "
            f"{question.work.global_batch} sequences of {question.work.seq_len} tokens: try a larger --gpus, a shorter "
            f"--seq-len or --moments bf16."
        )
    if not quiet:
        print(f"smallest that fits: {found} × {question.cluster.gpu.name}", file=sys.stderr)
    return replace(question, cluster=question.cluster.model_copy(update={"gpus": found}))


def _launch(target: str, question: Question, candidate: Candidate, out: Path) -> None:
    from moesaic.plan.launch import Plan, plain_name, write_launch_files

    plan = Plan(question.work, candidate.layout, question.cluster, plain_name(question.work.model.name))
    files = write_launch_files(target, plan, out)
    print(f"{', '.join(sorted(file.name for file in files))} in {out}", file=sys.stderr)


def _page(question: Question, result: PlanResult) -> str:
    from moesaic.cost.habits import habits_for
    from moesaic.cost.memory import stage_memory
    from moesaic.plan.steps import step_picture
    from moesaic.report.plan_page import PlanFacts, plan_page

    best, cluster = result.layouts[0], result.cluster
    picture = step_picture(result.workload, cluster, result.stack, best)
    facts = PlanFacts(
        result.as_json(),
        best.layout,
        stage_memory(result.workload, best.layout, habits_for(result.stack.framework)),
        best.available_bytes,
        cluster.fast_domain,
        cluster.node_size,
        picture.timeline,
        picture.layer,
        picture.shown,
        picture.micro_batches,
        simulated_seconds=picture.step_seconds,
        headroom_bytes=best.available_bytes - question.limit_bytes,
    )
    return plan_page(facts)


# ---------------------------------------------------------------- what is shown


def _show(result: PlanResult) -> None:
    from moesaic.plan.around import workload_text
    from moesaic.plan.result import layout_text, options_text, why_slower

    console = _console()
    best = result.layouts[0]
    low, high = best.interval_seconds
    console.print(f"[bold]{workload_text(result.workload)}[/] on {result.cluster.gpus:,} × {result.cluster.gpu.name}")
    console.print(f"searched {result.searched:,} layouts in {result.seconds:.1f} s; {result.fitting:,} fit in memory\n")
    console.print(_table(result.layouts))
    console.print(
        f"\nbest: {best.step_seconds:.3g} s a step, between {low:.3g} and {high:.3g} s nine times out of ten "
        f"({best.tokens_per_second_per_gpu:,.0f} tokens/s and {best.model_tflops_per_gpu:,.0f} model TFLOP/s an "
        f"accelerator)"
    )
    _parts(console, best)
    if len(result.layouts) > 1:
        console.print(f"runner-up is {why_slower(best, result.layouts[1])}")
    leaner = [each for each in result.front if each.memory_bytes < 0.9 * best.memory_bytes][:3]
    for each in leaner:
        console.print(
            f"with less memory: {layout_text(each.layout)} {options_text(each.layout)}: {each.memory_gib:.1f} GiB, "
            f"{each.step_seconds:.3g} s"
        )
    for note in result.notes:
        console.print(f"[dim]note: {note}[/]")


def _console() -> Any:
    """A console of the terminal's width; wide enough for a table where there is no terminal."""
    from rich.console import Console

    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160, highlight=False)


def _table(candidates: Sequence[Candidate]) -> Table:
    from rich.table import Table

    from moesaic.plan.result import layout_text, options_text

    table = Table(box=None, pad_edge=False)
    for head in ("layout", "options", "s/step", "tokens/s/GPU", "TFLOP/s", "GiB", "mem", "comm", "host"):
        text = head in ("layout", "options")
        table.add_column(head, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for each in candidates:
        walls = each.walls
        table.add_row(
            layout_text(each.layout),
            options_text(each.layout),
            f"{each.step_seconds:.3g}",
            f"{each.tokens_per_second_per_gpu:,.0f}",
            f"{each.model_tflops_per_gpu:,.0f}",
            f"{each.memory_gib:.1f}",
            *(f"{100 * walls[name]:.0f} %" for name in ("memory", "communication", "host")),
        )
    return table


def _parts(console: Any, candidate: Candidate) -> None:
    from moesaic.plan.result import GIB, WORDS

    time = sorted(candidate.time.items(), key=lambda item: -item[1])
    shown = [f"{WORDS[name]} {seconds:.3g} s" for name, seconds in time if seconds > 0.005 * candidate.step_seconds]
    console.print(f"time: {', '.join(shown)}; {candidate.hidden_seconds:.3g} s of communication hidden")
    held = sorted(candidate.memory.items(), key=lambda item: -item[1])
    parts = [f"{name} {size / GIB:.1f}" for name, size in held if size > 0.005 * candidate.memory_bytes]
    console.print(f"memory, GiB: {', '.join(parts)}")


def _show_why(answer: Why, question: Question) -> None:
    from moesaic.plan.around import lacking_gib
    from moesaic.plan.result import layout_text, options_text, why_slower

    console = _console()
    if answer.candidate is None:
        console.print(f"{answer.layout} is not legal: {answer.illegal}")
    else:
        console.print(_table([answer.candidate]))
        _parts(console, answer.candidate)
        lack = lacking_gib(answer.candidate, question)
        if answer.fits:
            console.print(f"it fits, with {-lack:.1f} GiB more than the headroom asks for")
        else:
            console.print(f"it does not fit: {lack:.1f} GiB too many")
            if not answer.changes:
                console.print("no single change makes it fit")
    if answer.best is not None:
        best = answer.best
        console.print(f"best here: {layout_text(best.layout)} {options_text(best.layout)}, {best.step_seconds:.3g} s")
        if answer.candidate is not None and answer.candidate.layout != best.layout:
            console.print(f"against it this layout is {why_slower(best, answer.candidate)}")
    _show_changes(console, answer.changes, "what would make it fit" if not answer.fits else "single changes")


def _show_around(answer: Why, found: Sequence[Change]) -> None:
    console = _console()
    if answer.candidate is not None:
        console.print(_table([answer.candidate]))
    _show_changes(console, found, "single changes")


def _show_changes(console: Any, found: Sequence[Change], title: str) -> None:
    from rich.table import Table

    if not found:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("change", "gain", "s/step", "GiB", ""):
        table.add_column(head, justify="left" if head in ("change", "") else "right")
    for change in found:
        table.add_row(
            change.what,
            f"{100 * change.gain:+.1f} %",
            f"{change.candidate.step_seconds:.3g}",
            f"{change.candidate.memory_gib:.1f}",
            "" if change.fits else "does not fit",
        )
    console.print(table)


def _why_json(answer: Why) -> dict[str, Any]:
    return {
        "layout": answer.layout,
        "legal": not answer.illegal,
        "reason": answer.illegal or None,
        "fits": answer.fits,
        "estimate": None if answer.candidate is None else answer.candidate.as_json(),
        "best": None if answer.best is None else answer.best.as_json(),
        "changes": [_change_json(change) for change in answer.changes],
    }


def _around_json(answer: Why, found: Sequence[Change]) -> dict[str, Any]:
    assert answer.candidate is not None
    return {"layout": answer.candidate.as_json(), "changes": [_change_json(change) for change in found]}


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "change": change.what,
        "gain": change.gain,
        "fits": change.fits,
        "layout": str(change.candidate.layout),
        "step_seconds": change.candidate.step_seconds,
        "memory_gib": change.candidate.memory_gib,
    }
