"""A rank's KV memory on a device, with a pool that moves host memory: the blocks of its jobs cross between.

::

    device KV memory                     host memory, laid out alike                pool
    ----------------                     ---------------------------                ----
    forward pass writes ...   stores:    forward_ended copies the blocks   -->      threads store them
    take_output copies the blocks        loaded by threads                 <--      loads
    ... and the scheduler hears of the load after that
    wait_layer copies a layer's pages    of layered loads

A block is in one load at most while it runs, and in no store before that has ended; blocks that several stores
name are full, and the same bytes every time. So no copy meets a transfer of other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput, Job, JobKind, JobOutcome, WorkerSide
from kvstrata.engine_adapter.connector.chunks import problem_of
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.paged.model.arrays import I64, Arrays

#: Bytes of a copy: it is gathered in new memory on both sides.
COPY_BYTES: Final = 64 << 20

_Bytes = npt.NDArray[np.uint8]


class DeviceMirror:
    """A :class:`~kvstrata.engine_adapter.connector.base.WorkerSide` for ``device`` memory, by way of ``inner``'s.

    ``host``, ``device``: flat u8[layout.memory_bytes], numpy's and ``arrays``'. Raises only what the device does
    when a copy fails, which no engine on it survives.
    """

    def __init__(
        self,
        inner: WorkerSide,
        layout: PoolLayout,
        host: _Bytes,
        device: _Bytes,
        arrays: Arrays,
        *,
        copy_bytes: int = COPY_BYTES,
    ) -> None:
        pieces = (layout.num_tensors * layout.parts, layout.num_blocks, layout.page_bytes // layout.parts)
        self._inner, self._layout, self._arrays = inner, layout, arrays
        #: Both as [pieces, num_blocks, bytes]: the first pieces at a block id are a group's block, as in ``layout``.
        self._host, self._device = host.reshape(pieces), device.reshape(pieces)
        self._copy_bytes = copy_bytes
        self._loads: dict[int, Job] = {}
        self._stores: list[Job] = []
        self._layered: list[Job] = []  # of this step
        self._copied: dict[int, int] = {}  # layers of a layered load that were copied as they came, by job

    def start(self, meta: ConnectorMeta) -> None:
        for job in meta.loads:
            # Of two jobs with one id, only the first is carried out.
            if self._loads.setdefault(job.job_id, job) is job and job.layered and not problem_of(job, self._layout):
                self._layered.append(job)
        self._stores.extend(meta.stores)
        self._inner.start(meta)

    def wait_layer(self, layer: int) -> bool:
        """The layer's pages are in device memory when attention reads them."""
        if not self._inner.wait_layer(layer):
            return False
        parts = self._layout.parts
        for job in self._layered:
            for blocks in job.groups:
                for piece in self._cut(blocks.group, np.asarray(blocks.block_ids, np.int64)):
                    self._copy_up(slice(layer * parts, (layer + 1) * parts), piece)
            self._copied[job.job_id] = self._copied.get(job.job_id, 0) + 1
        return True

    def layer_written(self, layer: int) -> None:
        """Stores wait for the end of the step, when their blocks are copied."""

    def forward_ended(self) -> None:
        """What the step's stores are of is in host memory before they may begin."""
        stores, self._stores = self._stores, []
        for group, ids in self._named(stores):
            for piece in self._cut(group, ids):
                rows = self._rows(group)
                found = self._arrays.xp.take(self._device[:rows], self._arrays.to_device(piece), axis=1)
                self._host[:rows, piece] = self._arrays.to_host(found)
        self._layered = []
        self._inner.forward_ended()

    def take_output(self) -> ConnectorOutput:
        """What was loaded is in device memory before anybody hears of it."""
        output = self._inner.take_output()
        for outcome in output.outcomes:
            job = self._loads.pop(outcome.job_id, None) if outcome.kind is JobKind.LOAD else None
            layers = self._copied.pop(outcome.job_id, 0)
            if job is None or not any(outcome.done):
                continue
            # Layers that were copied as they came are what was loaded, if all of it was.
            if 0 in outcome.done or layers < self._layout.groups[job.groups[0].group].layers:
                self._bring_up(job, outcome)
        return output

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._inner.set_waker(wake)

    def close(self) -> None:
        self._inner.close()

    def _bring_up(self, job: Job, outcome: JobOutcome) -> None:
        done = np.frombuffer(outcome.done, np.uint8) != 0
        offset = 0
        for blocks in job.groups:
            ids = np.asarray(blocks.block_ids, np.int64)
            loaded = ids[done[offset : offset + len(ids)]]
            offset += len(ids)
            for piece in self._cut(blocks.group, loaded):
                self._copy_up(slice(0, self._rows(blocks.group)), piece)

    def _copy_up(self, rows: slice, ids: I64) -> None:
        self._device[rows, self._arrays.to_device(ids)] = self._arrays.to_device(self._host[rows, ids])

    def _named(self, jobs: Sequence[Job]) -> list[tuple[int, I64]]:
        """Group and block ids, each once, of jobs that can be carried out: ``inner`` refuses the others."""
        named: dict[int, set[int]] = {}
        for job in jobs:
            if not problem_of(job, self._layout):
                for blocks in job.groups:
                    named.setdefault(blocks.group, set()).update(blocks.block_ids)
        return [(group, np.asarray(sorted(ids), np.int64)) for group, ids in named.items()]

    def _rows(self, group: int) -> int:
        return self._layout.groups[group].layers * self._layout.parts

    def _cut(self, group: int, ids: I64) -> list[I64]:
        """Into parts of a copy each."""
        size = max(1, self._copy_bytes // self._layout.block_bytes(group))
        return [ids[start : start + size] for start in range(0, len(ids), size)]
