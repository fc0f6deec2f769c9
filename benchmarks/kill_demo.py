"""Kill the demo at random moments and check that it ends at the loss of the run that nobody disturbed.

    python benchmarks/kill_demo.py --kills 10

Runs `examples/demo.py --quick` once undisturbed, then again and again with SIGKILL after a random time, in folders of
its own, until it is done; starts over while kills are left. Every finished run must have the metrics of the
undisturbed one, bit for bit, apart from times and memory. Exit code 0 if they do, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.py"
MEASURED = {
    "seconds",
    "elapsed",
    "tokens_per_second",
    "seconds_by_phase",
    "model_flops_per_second",
    "matmul_share",
    "peak_memory_bytes",
}
"""Keys of metrics.jsonl that depend on the clock and the machine."""


def main() -> int:
    """Runs the check and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="how often to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: %(default)s)")
    parser.add_argument("--dir", help="folder to work in (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-demo-") as temporary:
        return check(Path(options.dir or temporary), options.kills, random.Random(options.seed))


def check(work: Path, kills: int, chance: random.Random) -> int:
    """The undisturbed run, the killed ones, the comparison."""
    begin = time.monotonic()
    code = start(work / "undisturbed").wait()
    seconds = time.monotonic() - begin
    if code:
        print(f"the undisturbed run ended with exit code {code}: see {work / 'undisturbed' / 'log.txt'}")
        return 1
    wanted = metrics(work / "undisturbed")
    print(f"undisturbed: {len(wanted)} steps in {seconds:.1f} s, {loss_of(wanted)}")
    print(f"{'kill':>4}  {'run':>3}  {'after':>7}  {'steps done':>10}  newest checkpoint")

    done, rounds, same = 0, 0, True
    while done < kills:
        rounds += 1
        folder = work / f"killed-{rounds}"
        while True:
            process = start(folder)
            if done < kills:
                delay = chance.uniform(0.0, 0.8 * seconds)
                try:
                    code = process.wait(delay)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    done += 1
                    print(
                        f"{done:4}  {rounds:3}  {delay:6.1f}s  {len(metrics(folder)):10}  {newest(folder)}", flush=True
                    )
                    continue
            code = process.wait()
            break
        found = metrics(folder)
        differences = [step for step in sorted({*wanted, *found}) if wanted.get(step) != found.get(step)]
        if code or differences:
            same = False
            print(f"      run {rounds} ended with exit code {code}; steps that differ: {differences[:10]}")
        else:
            print(f"      run {rounds} ended as the undisturbed one: {loss_of(found)}")
    print("all equal, bit for bit" if same else "NOT equal")
    return 0 if same else 1


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The demo in a process group of its own, with text, tokens and run all under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "MOESAIC_CACHE": str(folder / "cache")}
    command = [sys.executable, str(DEMO), "--quick", "--dir", str(folder / "run"), "--cache", str(folder / "cache")]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Whole rows of a run's metrics by step, without what was measured by the clock."""
    path = folder / "run" / "metrics.jsonl"
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []:
        if line.endswith("\n"):
            row = json.loads(line)
            rows[row["step"]] = {key: value for key, value in row.items() if key not in MEASURED}
    return rows


def loss_of(rows: dict[int, dict[str, Any]]) -> str:
    """The last held-out loss with all its digits."""
    return f"held-out loss {rows[max(rows)]['validation_loss']!r}"


def newest(folder: Path) -> str:
    """The newest checkpoint's name."""
    found = sorted((folder / "run" / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    return found[-1].name if found else "none"


if __name__ == "__main__":
    sys.exit(main())
