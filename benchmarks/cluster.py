"""An emulated cluster: hosts are network namespaces of this machine, joined by links of a chosen speed.

    python -m benchmarks.cluster with --hosts 2 --link 1gbit --torchrun -- -m moesaic calibrate --out c.toml

or `up`, any number of `run`s, and `down`. Ranks of one host talk over its loopback; between hosts everything leaves
through one virtual card, which a token bucket (`tc tbf`) limits. Compute and communication then take real time, so that
what hides under what is measured in seconds. It needs root, `ip` and `tc`; without them it says so and skips.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "moesaic"
SUBNET = "10.213.7"
PORT = 29613
LIMITED_PACKET_BYTES = 30_000
"""Largest packet over a limited link. A bucket that is smaller than a packet cuts it into frames of 1,500 bytes, which
costs much of a host's processor where a card would do it; so packets are a little smaller than the smallest bucket."""
PACKET_BYTES = 65_536


class ClusterError(Exception):
    """A sentence for the user."""


def missing() -> str | None:
    """Why no cluster can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}: install iproute2"
    probe = f"{PREFIX}-probe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "br0", "type", "bridge")
        _ip("-n", probe, "link", "add", "port0", "type", "veth", "peer", "name", "eth0")
        _limit(probe, "eth0", "1gbit")
    except ClusterError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None


@dataclass(frozen=True)
class Cluster:
    """Hosts that are up. `owner` is the process whose end makes them leftovers."""

    hosts: int
    ranks_per_host: int
    owner: int

    @property
    def names(self) -> list[str]:
        """The namespaces of the hosts."""
        return [f"{PREFIX}-{self.owner}-{host}" for host in range(self.hosts)]

    def set_link(self, rate: str) -> None:
        """Limit what leaves each host to `rate`, as `tc` writes it (`200mbit`); "none" takes the limit away."""
        for name in self.names:
            if rate != "none":
                _packets(name, "eth0", LIMITED_PACKET_BYTES)
                _limit(name, "eth0", rate)
            else:
                subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
                _packets(name, "eth0", PACKET_BYTES)

    def environment(self, host: int) -> dict[str, str]:
        """What a command on a host is told of the cluster."""
        return {
            "NNODES": str(self.hosts),
            "NODE_RANK": str(host),
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
        }

    def run(self, command: Sequence[str], *, cwd: str | Path | None = None, timeout: float | None = None) -> list[str]:
        """Run a command on every host at once; what each prints on standard output, in the order of hosts.

        Raises:
            ClusterError: one of them failed, or took longer than `timeout` seconds.
        """
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env={**os.environ, **self.environment(host)},
                cwd=cwd,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for host, name in enumerate(self.names)
        ]
        said = []
        try:
            for process in running:
                said.append(process.communicate(timeout=timeout)[0])
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{command[0]} was not done after {timeout:g} s") from None
        finally:
            for process in running:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        failed = [host for host, process in enumerate(running) if process.returncode]
        if failed:
            codes = ", ".join(f"{running[host].returncode} on host {host}" for host in failed)
            raise ClusterError(f"{' '.join(command[:4])} ended with {codes}")
        return said

    def torchrun(self, arguments: Sequence[str], **options: object) -> list[str]:
        """`torchrun` with `arguments` on every host, one job; see `run`."""
        return self.run(self.torchrun_command(arguments), **options)  # type: ignore[arg-type]

    def sent(self) -> list[int]:
        """Bytes that have left each host over its link since it is up."""
        count = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(text) for text in self.run(["cat", count])]

    def torchrun_command(self, arguments: Sequence[str], python: str = sys.executable, port: int = PORT) -> list[str]:
        """The command, the same on every host: its shell fills in the host's number. Jobs at the same time need
        different ports."""
        start = (
            f"exec {python} -W ignore -m torch.distributed.run --nnodes {self.hosts} --node-rank $NODE_RANK "
            f"--nproc-per-node {self.ranks_per_host} --master-addr $MASTER_ADDR --master-port {port} "
            f'--local-addr {SUBNET}.$((NODE_RANK + 1)) "$@"'
        )
        return ["sh", "-c", start, "sh", *arguments]

    def up(self, link: str) -> None:
        """Make the hosts, a switch between them, and the links."""
        clear(dead_only=True)
        switch = f"{PREFIX}-{self.owner}-switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{SUBNET}.{host + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        self.set_link(link)

    def down(self) -> None:
        """Take away what `up` made, and end what still runs in it."""
        _remove(self.owner)


def clear(*, dead_only: bool) -> list[int]:
    """Remove clusters, only those whose owner has ended if asked; their owners."""
    owners = {int(name.split("-")[1]) for name in _namespaces() if name.split("-")[1].isdecimal()}
    gone = [owner for owner in sorted(owners) if not (dead_only and Path(f"/proc/{owner}").exists())]
    for owner in gone:
        _remove(owner)
    return gone


def found() -> Cluster | None:
    """The cluster that is up, by its namespaces."""
    hosts = [name.split("-") for name in _namespaces() if name.split("-")[-1].isdecimal()]
    if not hosts:
        return None
    owner = int(hosts[0][1])
    count = sum(int(each[1]) == owner for each in hosts)
    return Cluster(count, int(_note(owner).read_text()) if _note(owner).exists() else 1, owner)


@contextlib.contextmanager
def cluster(hosts: int, ranks_per_host: int, link: str) -> Iterator[Cluster]:
    """A cluster that is up inside, and gone afterwards whatever happens."""
    why = missing()
    if why is not None:
        raise ClusterError(why)
    made = Cluster(hosts, ranks_per_host, os.getpid())
    atexit.register(made.down)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        made.up(link)
        yield made
    finally:
        made.down()
        atexit.unregister(made.down)
        signal.signal(signal.SIGTERM, before)


def _note(owner: int) -> Path:
    return Path(f"/run/{PREFIX}-{owner}")


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{PREFIX}-") and name.count("-") == 2]


def _remove(owner: int) -> None:
    for name in _namespaces():
        if name.split("-")[1] != str(owner):
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    _note(owner).unlink(missing_ok=True)


def _packets(name: str, card: str, most_bytes: int) -> None:
    _ip("-n", name, "link", "set", card, "gso_max_size", str(most_bytes))


def _limit(name: str, card: str, rate: str) -> None:
    """The bucket holds a millisecond of the rate, so that nothing of size passes at once; the queue is short, so that
    small messages do not wait long behind large ones."""
    burst = max(32_000, int(_bits_per_second(rate) / 8 / 1000))
    bucket = ("tbf", "rate", rate, "burst", f"{burst}b", "latency", "10ms")
    # Replaced in place: between deleting and adding, what flows would be without a limit.
    _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", card, "root", *bucket)


def _bits_per_second(rate: str) -> float:
    for unit, bits in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            with contextlib.suppress(ValueError):
                return float(rate.removesuffix(unit)) * bits
    raise ClusterError(f'a link of {rate!r} is no rate: write it as "200mbit" or "2gbit", or "none"')


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 0 where it is skipped, with the reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="act", required=True)
    for act, text in (("up", "make hosts and links"), ("with", "up, run and down")):
        part = parts.add_parser(act, help=text)
        part.add_argument("--hosts", type=int, default=2)
        part.add_argument("--ranks-per-host", type=int, default=1)
        part.add_argument("--link", default="1gbit", help='rate of each host\'s link, as tc writes it, or "none"')
    for act in ("run", "with"):
        part = parts.choices.get(act) or parts.add_parser(act, help="run a command on every host")
        part.add_argument("--torchrun", action="store_true", help="the command is what torchrun is given")
        part.add_argument("command", nargs="+")
    parts.add_parser("down", help="take all clusters of this machine away")
    args = parser.parse_args(arguments)
    why = missing()
    if why is not None:
        print(f"skipped: {why}")
        return 0
    try:
        if args.act == "down":
            print(f"removed {len(clear(dead_only=False))}")
        elif args.act == "up":
            # The shell that called stays; this process does not.
            made = Cluster(args.hosts, args.ranks_per_host, os.getppid())
            made.up(args.link)
            _note(made.owner).write_text(str(args.ranks_per_host))
            print(f"{args.hosts} hosts: {', '.join(made.names)}")
        elif args.act == "run":
            up = found()
            if up is None:
                raise ClusterError("no cluster is up: python -m benchmarks.cluster up")
            _print(up, args)
        else:
            with cluster(args.hosts, args.ranks_per_host, args.link) as made:
                _print(made, args)
    except ClusterError as error:
        print(f"benchmarks.cluster: {error}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _print(up: Cluster, args: argparse.Namespace) -> None:
    for text in up.torchrun(args.command) if args.torchrun else up.run(args.command):
        sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
