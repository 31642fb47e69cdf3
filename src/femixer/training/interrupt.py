"""Ctrl-C and SIGTERM as a request that the training loop answers between two steps."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and has saved a checkpoint after `step` steps, unless the run keeps none."""

    def __init__(self, step: int, steps: int, saved: bool = True) -> None:
        super().__init__(f"stopped after step {step} of {steps}, which is {'' if saved else 'not '}saved")


class StopRequest:
    """While this context is active, SIGINT and SIGTERM only set `requested`.

    A second signal is not held back: the handlers that were there before answer it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
