"""Notices at once that another process of a run has ended, and soon that one hangs.

A collective waits for a process that is suspended, swaps or has lost its network, for half an hour
over gloo; JAX's own heartbeats end the others by SIGABRT, with a stack trace. Here each process
keeps a connection to the first one, over which both say all the time that they live.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_ALIVE, _GOODBYE = b".", b"q"
# A process that fails for a reason of its own closes its connections; whoever fails for the same
# reason shall have the time to say so. Not when the first one ends, where JAX's coordinator is:
# JAX aborts the others within a few hundredths of a second.
_GRACE = 2.0


class Watch:
    """A thread that calls `lost` when another process ended without a goodbye, or is silent."""

    def __init__(self, host: str, silence: float, lost: Callable[[str], Any]):
        """Connects the processes; all must make theirs.

        Args:
          host: Where the others find the first process: its name or address.
          silence: Seconds after which it is lost; sooner by a tenth, so that it is said in time.
          lost: Called in the thread, with what happened; must end this process.
        """
        self._pause, self._silence, self._lost = silence / 20, 0.9 * silence, lost
        self._ended = threading.Event()
        self._peers = _connected(host, silence)
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says goodbye: this process is about to end, as it should."""
        self._ended.set()
        self._thread.join()
        for peer in self._peers:
            _send(peer, _GOODBYE)
            peer.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            for peer in select.select(self._peers, [], [], self._pause)[0]:
                self._listen(peer)
            for peer, name in list(self._peers.items()):
                _send(peer, _ALIVE)
                silent = time.monotonic() - self._heard[peer]
                if silent > self._silence:
                    self._lost(f"{name} has been silent for {silent:.0f} s")
            # A connection that is always readable must not make this a busy loop.
            self._ended.wait(self._pause / 2)

    def _listen(self, peer: socket.socket) -> None:
        try:
            said = peer.recv(4096)
        except OSError:
            said = b""
        self._heard[peer] = time.monotonic()
        if said and not said.endswith(_GOODBYE):
            return
        name = self._peers.pop(peer)
        peer.close()
        grace = 0.0 if name == "process 0" else _GRACE
        if not said and not self._ended.wait(min(grace, self._silence)):
            self._lost(f"{name} has ended")


def _connected(host: str, seconds: float) -> dict[socket.socket, str]:
    """Connections to the others that this process watches, with their names."""
    if jax.process_count() == 1:
        return {}
    first = jax.process_index() == 0
    server = socket.create_server(("", 0), backlog=jax.process_count()) if first else None
    port = server.getsockname()[1] if server else 0
    port = int(multihost_utils.broadcast_one_to_all(np.array(port, np.int32)))
    if server is None:
        peer = socket.create_connection((host, port), seconds)
        peer.sendall(f"{jax.process_index():8}".encode())
        return {_prepared(peer): "process 0"}
    peers = {}
    with server:
        server.settimeout(seconds)
        while len(peers) < jax.process_count() - 1:
            peer, _ = server.accept()
            number = int(peer.recv(8, socket.MSG_WAITALL))
            peers[_prepared(peer)] = f"process {number}"
    return peers


def _prepared(peer: socket.socket) -> socket.socket:
    peer.setblocking(False)
    return peer


def _send(peer: socket.socket, what: bytes) -> None:
    try:
        peer.send(what)
    except OSError:  # its end is noticed where it is listened to
        return
