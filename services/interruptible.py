"""Signals that ask for an end, as an exception in whatever call the main thread is in."""

from __future__ import annotations

import signal
import socket
import threading

AGAIN_S = 2.0  # longer than what hears an interrupt needs to say so


def asking() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to end. A hang-up does not if it is ignored: `nohup` started this."""
    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


class Interruptible:
    """While it is entered, the signals of `asking` raise KeyboardInterrupt in whatever call the main thread is in.

    Python drops what a handler raises while a callback of its own runs (a weak reference's, a fork's, a destructor's),
    and Ray's start puts a handler of Ray's in place. So a thread listens for signals too, whatever handler they
    have, and sends SIGINT every `AGAIN_S` seconds until `was_heard`. Main thread only.
    """

    def __init__(self) -> None:
        self._heard, self._asking = threading.Event(), asking()

    def install(self) -> None:
        """Put the handlers in place, again if something else replaced them."""
        for number in self._asking:
            signal.signal(number, _interrupt)

    def was_heard(self) -> None:
        """The block is ending: only another signal from outside interrupts it again."""
        self._heard.set()

    def __enter__(self) -> Interruptible:
        self._before = {number: signal.getsignal(number) for number in self._asking}
        self._told, told = socket.socketpair()
        told.setblocking(False)
        self._telling, self._told_before = told, signal.set_wakeup_fd(told.fileno())
        threading.Thread(target=self._repeat, name="interrupt", daemon=True).start()
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.was_heard()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._told_before)
        self._telling.close()

    def _repeat(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        with self._told:
            while told := self._told.recv(1):  # the number of a signal
                while told[0] in self._asking and not self._heard.wait(AGAIN_S):
                    signal.pthread_kill(main, signal.SIGINT)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
