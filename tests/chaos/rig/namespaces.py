"""Network namespaces: each worker as on a host of its own, on one wire, from which it can be unplugged.

The namespaces hang on a bridge, each by a pair of virtual interfaces. To unplug one is to take the bridge's end of its
pair down: packets vanish both ways, no connection is closed or refused, nobody is told. Needs root and `ip` (iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import randrange

import psutil

from services.lifeline import die_with_parent
from services.rpc.build import ROOT

NAMESPACES, INTERFACES = Path("/var/run/netns"), Path("/sys/class/net")


def why_not() -> str:
    """Why there can be no namespaces here, in a sentence; empty when there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    probe = Wire(["here", "there"])
    try:
        probe.start()
        return "" if probe.carries("here", "there") else "packets do not pass between them: is there a firewall?"
    except CannotBuild as error:
        return str(error)
    finally:
        probe.stop()


class CannotBuild(Exception):
    """`ip` refused, and said why."""


class Wire:
    """One namespace a name. `start` before use, `stop` at the end; what a killed rig left goes at the next start."""

    def __init__(self, names: list[str]) -> None:
        self._mark = f"cx{os.getpid():x}"  # of everything that is ours; interface names have 15 characters at most
        self._network = ""
        self._relays: list[subprocess.Popen[bytes]] = []
        self._numbers = {name: number for number, name in enumerate(names, 2)}

    @property
    def host(self) -> str:
        """The rig's own address on the wire."""
        return f"{self._network}.1"

    def address(self, name: str) -> str:
        """Where the others reach it."""
        return f"{self._network}.{self._numbers[name]}"

    def inside(self, name: str) -> list[str]:
        """What a command line begins with to run there."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def carries(self, here: str, there: str) -> bool:
        """Whether a packet comes through: a port where nobody listens answers that, in words of the kernel's."""
        knock = ["timeout", "3", "bash", "-c", f": > /dev/tcp/{self.address(there)}/9"]
        return b"refused" in subprocess.run([*self.inside(here), *knock], capture_output=True).stderr

    def start(self) -> None:
        """Build it. Raises CannotBuild."""
        self._sweep()
        self._network = _unused_network()
        _ip("link", "add", self._mark, "type", "bridge")
        _ip("address", "add", f"{self.host}/24", "dev", self._mark)
        _ip("link", "set", self._mark, "up")
        for name in self._numbers:
            namespace, plug = self._namespace(name), self._plug(name)
            _ip("netns", "add", namespace)
            _ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", plug, "master", self._mark, "up")
            _ip("-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", link, "up")

    def stop(self) -> None:
        """Take it down, when nothing runs inside any more."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
        self._remove(self._mark)

    def lead_in(self, name: str, port: int) -> None:
        """What comes for this port of a namespace goes to its loopback."""
        relay = [sys.executable, "-m", "tests.chaos.rig.relay", self.address(name), str(port)]
        process = subprocess.Popen(
            [*self.inside(name), *relay], cwd=ROOT, start_new_session=True, preexec_fn=die_with_parent
        )
        self._relays.append(process)

    def unplug(self, name: str) -> None:
        """From now on nothing comes out of this namespace, and nothing goes in."""
        _ip("link", "set", self._plug(name), "down")

    def plug_in(self, name: str) -> None:
        """The wire is whole again."""
        _ip("link", "set", self._plug(name), "up")

    def _namespace(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _plug(self, name: str) -> str:
        return f"{self._mark}p{self._numbers[name]}"

    def _sweep(self) -> None:
        """Remove what rigs left that are no more."""
        marks = {name.partition("-")[0] for name in _namespaces() if name.startswith("cx")}
        for mark in marks:
            if not psutil.pid_exists(int(mark.removeprefix("cx"), 16)):
                self._remove(mark)

    @staticmethod
    def _remove(mark: str) -> None:
        for namespace in _namespaces():
            if namespace.startswith(f"{mark}-"):
                _ip("netns", "delete", namespace)  # the pairs of interfaces go with it
        if (INTERFACES / mark).exists():
            _ip("link", "delete", mark)


def _namespaces() -> list[str]:
    return [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.exists() else []


def _unused_network() -> str:
    """The first three bytes of a network that no interface here is in."""
    used = {address.address.rpartition(".")[0] for links in psutil.net_if_addrs().values() for address in links}
    while (network := f"10.213.{randrange(256)}") in used:
        pass
    return network


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"`ip {' '.join(words)}` says: {done.stderr.strip()}")
    return done.stdout
