"""A small network on one machine: a namespace for each process, a bridge, links with a rate.

The bridge has its own namespace, and nothing is added to the machine's own network. So any number
of these networks can exist at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.cluster.plan import Rate

INTERFACE = "eth0"
_TOOLS = ("ip", "tc", "unshare", "taskset", "chrt")
# With frames of 1500 bytes the shaped rates come out wrong on virtual links.
_MTU = 9000
# Bytes that may wait at a shaped link before packets are dropped.
_QUEUE = 1_048_576
# In namespaces of its own for host name and mounts, a process finds its address under the name of
# its host: JAX's collectives listen on the address that the host name resolves to.
_ENTER = 'echo "$1" > /proc/sys/kernel/hostname; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class NetworkUnavailable(RuntimeError):
    """Reports, in one sentence with the remedy, that this machine cannot have such a network."""


def check_available() -> None:
    """Checks that this machine can make such a network.

    Raises:
      NetworkUnavailable: If it cannot.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise NetworkUnavailable(
            "benchmarks.cluster makes namespaces and shapes links, which needs root on Linux: run "
            "it with sudo, or in a container with --cap-add=NET_ADMIN,SYS_ADMIN."
        )
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NetworkUnavailable(
            f"benchmarks.cluster needs the commands {', '.join(missing)}, of the packages "
            "iproute2 and util-linux: apt-get install iproute2 util-linux"
        )


class Network:
    """Hosts with one link each to a common switch; a context manager that removes them."""

    def __init__(self, hosts: int):
        """Names the hosts; `__enter__` makes them."""
        self.names = [f"cluster-{os.getpid()}-{i}" for i in range(hosts)]
        self.addresses = [f"10.77.{i // 250}.{i % 250 + 1}" for i in range(hosts)]
        self._switch = f"cluster-{os.getpid()}-switch"
        self._rate: Rate | None = None
        self._hosts_file = Path()

    def __enter__(self) -> Self:
        """Makes the network; links have no limit at first.

        Raises:
          NetworkUnavailable: If the kernel or the container does not allow it.
        """
        with tempfile.NamedTemporaryFile("w", prefix="cluster-hosts-", delete=False) as file:
            print("127.0.0.1 localhost", file=file)
            for address, host in zip(self.addresses, self.names, strict=True):
                print(address, host, file=file)
        self._hosts_file = Path(file.name)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._switch
        _run(f"ip netns add {switch}")
        # No spanning tree, no waiting before a port forwards.
        _run(f"ip -n {switch} link add br0 type bridge stp_state 0 forward_delay 0")
        _run(f"ip -n {switch} link set br0 up")
        for i, (host, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {host}"
            _run(f"ip netns add {host}")
            _run(f"ip -n {switch} link add {port}")
            _run(f"ip -n {switch} link set port{i} master br0 up")
            _run(f"ip -n {host} link set lo up")
            _run(f"ip -n {host} address add {address}/16 dev {INTERFACE}")
            _run(f"ip -n {host} link set {INTERFACE} up")

    def shape(self, rate: Rate) -> None:
        """Sets the rate of every link, in both directions.

        Raises:
          NetworkUnavailable: If the kernel has no `tbf`.
        """
        if rate == self._rate:
            return
        links = [f"{host} qdisc {{}} dev {INTERFACE} root" for host in self.names]
        for i in range(len(self.names)):
            links.append(f"{self._switch} qdisc {{}} dev port{i} root")
        for link in links:
            if rate.bits_per_second is not None:
                limits = f"rate {rate.bits_per_second:.0f}bit burst {rate.burst} limit {_QUEUE}"
                _run(f"tc -n {link.format('replace')} tbf {limits}")
            elif self._rate is not None and self._rate.bits_per_second is not None:
                _run(f"tc -n {link.format('del')}")
        self._rate = rate

    def command(self, host: int, core: int, arguments: Sequence[str]) -> list[str]:
        """Returns a command that runs another one on a host, on one core, as a batch process.

        `SCHED_BATCH`, because under the default policy a pinned process wakes milliseconds late
        when a small message arrives. Each part of the command replaces itself by the next part, so
        the final process keeps the id of the first.
        """
        name = self.names[host]
        inside = ["chrt", "-b", "0", "taskset", "-c", str(core), *arguments]
        outside = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount"]
        return [*outside, "sh", "-ec", _ENTER, "sh", name, str(self._hosts_file), *inside]

    def close(self) -> None:
        """Deletes the namespaces and their links; the processes must have ended before."""
        for name in [*self.names, self._switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        self._hosts_file.unlink(missing_ok=True)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailable(
            f"The kernel or the container refused `{command}`: "
            f"{done.stderr.strip() or f'exit code {done.returncode}'}."
        )
