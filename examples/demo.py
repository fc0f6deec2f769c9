"""Train a small mixture of experts on Python's own source and look at the result: `make demo`.

    python examples/demo.py            a few minutes on two cores
    python examples/demo.py --quick    half a minute, a much smaller model that learns little
    python examples/demo.py --fresh    from the start, although a run is there
    python examples/demo.py --layout 'pp2 dp2 / ep2'    the same training on four processes: `make demo-parallel`

Everything is kept: stopped or killed at any moment, the same command goes on where it was and ends at the same loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moesaic.spec.layout import parse_layout
from moesaic.spec.tables import LayoutTable

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE / "demo.toml"
NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"} | {
    "locale.py",
    "entities.py",
}
"""Folders and files left out: other people's packages, tests, and tables that are data rather than code."""
LIMIT, QUICK_LIMIT = 20_000_000, 1_500_000
BASELINES = ("unigram", "bigram")
PROMPTS = (
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self',
    "def read_config(path",
)
QUICK = (
    "model.vocab_size=1024",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.head_dim=16",
    "model.moe_intermediate_size=96",
    "data.tokenizer=bpe:1024",
    "train.steps=100",
    "train.lr=3e-3",
    "train.seq_len=128",
    "train.global_batch=8",
    "train.warmup_steps=10",
    "train.checkpoint_every=5",
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo and returns moesaic's exit code."""
    options = parse(arguments)
    console = Console(highlight=False)
    cache, folder = Path(options.cache), Path(options.dir)
    # Tokens and the tokenizer go beside the text instead of the user's cache folder, so that all of it is in one place.
    os.environ.setdefault("MOESAIC_CACHE", str(cache))
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)

    console.rule("1. Text")
    text = cache / ("python-stdlib-quick.jsonl" if options.quick else "python-stdlib.jsonl")
    console.print(collect(text, QUICK_LIMIT if options.quick else LIMIT))

    layout = parse_layout(options.layout)
    processes = layout.pp * int(layout.dp) * layout.cp * layout.tp
    settings = [*(QUICK if options.quick else ()), f'data.path="{text}"', f'run.dir="{folder}"']
    console.rule("2. What counting reaches")
    show_baselines(console, measure_baselines(settings, folder, console))

    console.rule("3. Training")
    command = ["train", str(RUN_FILE), "--resume", *(word for text in settings for word in ("--set", text))]
    if processes > 1:
        code = train_on(processes, [*command, *layout_settings(layout)])
    else:
        from moesaic.cli.main import main as moesaic

        code = moesaic(command)
    if code:
        again = "The same command goes on from here." if code == 3 else "--fresh starts over."
        console.print(f"Training ended with exit code {code}. {again}")
        return code

    console.rule("4. A sample")
    console.print(write_sample(folder, 60 if options.quick else 140), markup=False)

    console.rule("5. Result")
    show_result(console, folder)
    if processes > 1:
        show_difference(console, folder, Path(folder_of(options.quick, 1)))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a much smaller model, about half a minute")
    parser.add_argument("--fresh", action="store_true", help="delete the run's folder and start over")
    parser.add_argument("--dir", help="folder of the run (default: runs/demo, or runs/demo-quick)")
    parser.add_argument(
        "--cache", default=".cache/demo", help="folder of the text and its tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--layout", default="", help="train in this layout, on as many processes as it takes (default: one process)"
    )
    options = parser.parse_args(arguments)
    options.dir = options.dir or folder_of(options.quick, 2 if options.layout else 1)
    return options


def folder_of(quick: bool, processes: int) -> str:
    """Where a run of the demo goes by default."""
    return "runs/demo" + ("-quick" if quick else "") + ("-parallel" if processes > 1 else "")


def layout_settings(layout: LayoutTable) -> list[str]:
    """The --set words of a layout, with micro-batches of one sequence, which leaves enough of them for a pipeline, and
    as many of these in an evaluation as make the same sequences."""
    from moesaic.spec.run import load_run

    run = load_run(RUN_FILE)
    degrees = {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep", "etp")} | {"micro_batch": 1}
    words = [f"layout.{name}={degree}" for name, degree in degrees.items()]
    words.append(f"train.eval_batches={run.train.eval_batches * run.layout.micro_batch}")
    return [word for text in words for word in ("--set", text)]


def train_on(processes: int, command: list[str]) -> int:
    """Runs `moesaic` under torchrun; its exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.run([*torchrun, "-m", "moesaic", *command], env=environment, check=False).returncode


def show_difference(console: Console, folder: Path, alone: Path) -> None:
    """Prints how far the run ended from the same training in one process, if that was run."""
    from moesaic.report import read_run

    if not (alone / "metrics.jsonl").is_file():
        console.print(f"Run the demo without --layout to compare: nothing is in {alone}.")
        return
    here, there = read_run(folder), read_run(alone)
    found, expected = here.last("validation_loss"), there.last("validation_loss")
    if found is None or expected is None or here.run["train"]["steps"] != there.run["train"]["steps"]:
        console.print(f"{alone} is another run or is not finished: nothing to compare with.")
        return
    first = abs(here.series("loss")[0][1] - there.series("loss")[0][1])
    console.print(
        f"In one process ({alone}) the held-out loss ended at {expected:.4f}, here at {found:.4f}: "
        f"{abs(found - expected):.4f} apart. The losses of step 1 differ by {first:.1e}: sums in another order."
    )


def collect(path: Path, limit: int) -> str:
    """Writes the standard library's modules to `path`, one JSON object a line, up to `limit` bytes of source.

    Does nothing if the file was made from this Python with this limit. Returns a sentence about what is there.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    sentence = f"the standard library of Python {platform.python_version()} in {library}"
    about = path.with_suffix(".json")
    wanted = {"library": str(library), "python": platform.python_version(), "limit": limit}
    if path.is_file() and about.is_file():
        known = json.loads(about.read_text(encoding="utf-8"))
        if {key: known.get(key) for key in wanted} == wanted:
            return f"{known['modules']} modules, {known['bytes'] / 1e6:.1f} MB: {sentence} (kept in {path})"
    modules = size = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as file:
        for module in sorted(library.rglob("*.py")):
            name = module.relative_to(library)
            if NOT_CODE & set(name.parts):
                continue
            try:
                source = module.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            length = len(source.encode())
            if source.strip() and size + length <= limit:
                file.write(json.dumps({"name": name.as_posix(), "text": source}) + "\n")
                modules, size = modules + 1, size + length
    partial.replace(path)
    write(about, json.dumps({**wanted, "modules": modules, "bytes": size}))
    return f"{modules} modules, {size / 1e6:.1f} MB: {sentence} (written to {path})"


def measure_baselines(settings: list[str], folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Unigram and bigram on the run's own held-out tokens; tokenises the text, and writes baselines.json.

    Kept for as long as data and sequences stay the same.
    """
    from moesaic.spec.run import load_run

    run = load_run(RUN_FILE, settings)
    vocab = run.model_spec().vocab
    path = folder / "baselines.json"
    judged = {
        "data": run.data.model_dump(),
        "seq_len": run.train.seq_len,
        "vocab": vocab,
        "batches": run.train.eval_batches,
    }
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known.get("judged") == judged:
            return known
    from baselines import measure

    from moesaic.train.data import build_data

    data = build_data(run, vocab, os.environ["MOESAIC_CACHE"], console)
    assert data.validation is not None
    sequences = run.train.eval_batches * run.layout.micro_batch or None
    found = {**measure(data.train, data.validation.once(sequences), vocab), "judged": judged}
    folder.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(found, indent=1))
    return found


def show_baselines(console: Console, found: dict[str, dict[str, Any]]) -> None:
    """Prints the baselines."""
    for name in BASELINES:
        numbers = found[name]
        console.print(
            f"{name:8}{numbers['loss']:.3f} nats per held-out token, {numbers['bits_per_byte']:.3f} bits per byte "
            f"({numbers['smoothing']})"
        )


def write_sample(folder: Path, tokens: int) -> str:
    """Continues each prompt with the trained model; returns the text and writes it to sample.txt."""
    from moesaic.train.generate import continue_text

    samples = [
        "".join(continue_text(folder, prompt, tokens, temperature=0.7, top_k=40, seed=7 + index))
        for index, prompt in enumerate(PROMPTS)
    ]
    text = "\n\n# ----------------------------------------\n\n".join(sample.rstrip() for sample in samples) + "\n"
    write(folder / "sample.txt", text)
    return text


def show_result(console: Console, folder: Path) -> None:
    """Writes the report and prints what the run reached and where everything is."""
    from moesaic.report import read_run, write_report
    from moesaic.report.balance import final_loads
    from moesaic.report.facts import dead_experts
    from moesaic.report.numbers import duration, gib, short

    report = write_report(folder)
    record = read_run(folder)
    held, bits = record.last("validation_loss"), record.last("validation_bits_per_byte")
    table = Table("held-out text", "nats per token", "bits per byte", box=None, pad_edge=False)
    for name in BASELINES:
        numbers = record.baselines[name]
        table.add_row(f"{name} counts", f"{numbers['loss']:.3f}", f"{numbers['bits_per_byte']:.3f}")
    table.add_row("this model", f"{held:.3f}", f"{bits:.3f}", style="bold")
    console.print(table)
    for name in BASELINES:
        gain = float(record.baselines[name]["loss"]) - (held or math.inf)
        console.print(f"{abs(gain):.3f} nats per token {'below' if gain > 0 else 'ABOVE'} {name} counts")
    if record.run["train"]["steps"] < 500:
        console.print("(--quick is too short to get below the bigram.)")

    experts = sum(len(load) for _, load in final_loads(record))
    alive = experts - len(dead_experts(record))
    speeds = sorted(value for _, value in record.series("tokens_per_second"))
    console.print(
        f"\n{alive} of {experts} experts alive · {short(record.last('total_tokens'))} tokens in "
        f"{duration(record.last('elapsed'))} · {short(speeds[len(speeds) // 2])} tokens per second · "
        f"{gib(record.last('peak_memory_bytes'))}\n"
    )
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    places = {
        "report": report,
        "checkpoint": newest,
        "metrics": folder / "metrics.jsonl",
        "sample": folder / "sample.txt",
    }
    for name, path in places.items():
        console.print(f"{name:11}{path.resolve()}", soft_wrap=True)
    console.print(
        f"\nNext: open the report in a browser; moesaic generate {folder} --prompt 'def main('; "
        f"moesaic export {newest} OUT for transformers.",
        soft_wrap=True,
    )


def write(path: Path, text: str) -> None:
    """Writes a file that is whole or absent."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
