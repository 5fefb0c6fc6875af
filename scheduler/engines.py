"""Engines loaded in this process: bounded, shared between runs, closed when nobody uses them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ..backends.base import Engine

LeaseKey = tuple[str, ...]
"""Engine digest, precision and run-time options: what makes two loaded engines different."""


@dataclass(eq=False, slots=True)
class Lease:
    """A loaded engine and who uses it.

    busy: held while the engine runs; taken without waiting on the hot path.
    users: sessions that hold it; guarded by the shelf's lock.
    """

    key: LeaseKey
    engine: Engine
    busy: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class LoadedEngines:
    """At most `limit` loaded engines, the least recently used closed first; one in use is never closed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._leases: OrderedDict[LeaseKey, Lease] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: LeaseKey, load: Callable[[], Engine]) -> Lease:
        """The engine of `key`, loaded when it is not there yet. Raises what `load` raises.

        Others are closed *before* loading, so that two large engines never stand side by side for no reason.
        """
        with self._lock:
            lease = self._leases.get(key)
            if lease is None:
                self._shrink(self.limit - 1)
                lease = self._leases[key] = Lease(key, load())
            self._leases.move_to_end(key)
            lease.users += 1
            return lease

    def give_back(self, lease: Lease) -> None:
        with self._lock:
            lease.users -= 1
            self._shrink(self.limit)

    def drop(self, key_prefix: str) -> None:
        """Close every engine whose digest is `key_prefix`; those in use are closed when they are given back."""
        with self._lock:
            for key in [k for k in self._leases if k[0] == key_prefix]:
                lease = self._leases[key]
                if lease.users <= 0:
                    del self._leases[key]
                    lease.engine.close()

    def digests(self) -> frozenset[str]:
        """Digests of the engines that are loaded."""
        with self._lock:
            return frozenset(key[0] for key in self._leases)

    def total_bytes(self) -> int:
        """What the loaded engines say they hold on their devices, in bytes."""
        with self._lock:
            return sum(lease.engine.device_bytes for lease in self._leases.values())

    def close(self) -> None:
        with self._lock:
            leases, self._leases = list(self._leases.values()), OrderedDict()
        for lease in leases:
            lease.engine.close()

    def _shrink(self, limit: int) -> None:
        for key in list(self._leases):
            if len(self._leases) <= max(0, limit):
                return
            if self._leases[key].users <= 0:
                self._leases.pop(key).engine.close()
