"""Processes that start without importing the main script.

A process of multiprocessing's method "spawn" imports the main script of its parent before it runs
its target. For a script that trains, that takes seconds and memory for PyTorch, and without an
`if __name__ == "__main__"` it would train again. Workers need nothing from the script (see
`Reward.is_importable`).

`WorkerContext` is used like multiprocessing's own contexts. Processes of other contexts still
import the main script.
"""

from __future__ import annotations

import io
import os
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess


class WorkerPopen(popen_spawn_posix.Popen):
    """Starts a process as "spawn" does, but without the path of the main script."""

    _fds: list[int]  # files of this process that the new one gets

    def _launch(self, process_obj: BaseProcess) -> None:
        """Starts an interpreter, and sends it how to prepare itself and what to run.

        multiprocessing has no option for this, so this overrides the method of its Popen.
        """
        tracker_fd = resource_tracker.getfd()
        message = self._make_message(process_obj)
        message_end, message_start = os.pipe()
        # Nobody writes into this pipe. Its other end, the sentinel, becomes readable when the
        # process ends: that is how multiprocessing waits for a process.
        self.sentinel, life_end = os.pipe()
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=message_end)
            inherited = [*self._fds, tracker_fd, message_end, life_end]
            self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, inherited)
            with open(message_start, "wb", closefd=False) as pipe:
                pipe.write(message)
        finally:
            # The process watches the other end of its message to see that this one has ended, so
            # `message_start` stays open as long as this object lives.
            self.finalizer = util.Finalize(self, _close_files, (self.sentinel, message_start))
            os.close(message_end)
            os.close(life_end)

    def _make_message(self, process_obj: BaseProcess) -> bytes:
        """Returns two pickles: the settings of the interpreter, and the process."""
        preparation = {
            name: value
            for name, value in spawn.get_preparation_data(process_obj.name).items()
            if not name.startswith("init_main")
        }
        buffer = io.BytesIO()
        # While a process is pickled, its pipes and locks ask this object to hand down their files.
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        return buffer.getvalue()


def _close_files(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class WorkerProcess(SpawnProcess):
    """A process that starts by `WorkerPopen`."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> WorkerPopen:  # noqa: N802 - multiprocessing's name
        return WorkerPopen(process_obj)


class WorkerContext(SpawnContext):
    """multiprocessing's context "spawn", with `WorkerProcess` as its process."""

    Process = WorkerProcess
