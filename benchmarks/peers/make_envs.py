"""Makes one virtual environment per peer, all on the torch of the interpreter that runs this script.

    python benchmarks/peers/make_envs.py [--envs FOLDER] [--only NAME]...

Peers are installed from PyPI without their dependencies, plus the few small ones that their MoE code imports; torch,
transformers and numpy come from the running interpreter through a .pth file, so every peer computes with the same
torch and nothing pulls a CUDA build. Megatron-Core asks for Python 3.12 and works on 3.11: that check is skipped.
About 2 GB, nearly all of it triton, twice.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.registry import DEFAULT_ENVS, PACKAGES


def make(name: str, envs: Path) -> None:
    """Creates `envs/name` and installs its packages; does nothing twice except what pip finds missing."""
    folder = envs / name
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    # Named so that it is read last: what the peer's own environment holds comes first on its path.
    (site / "zz_base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *PACKAGES[name]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVS, help=f"folder (default {DEFAULT_ENVS})")
    parser.add_argument("--only", action="append", choices=sorted(PACKAGES), help="make only these")
    args = parser.parse_args()
    args.envs.mkdir(parents=True, exist_ok=True)
    for name in args.only or PACKAGES:
        make(name, args.envs)
        print(f"{name}: {args.envs / name}")


if __name__ == "__main__":
    main()
