"""Loaded by every Python process of the federation's tests: logs each process, each address
that it connects to, and each name that it resolves."""

import os
import sys


def _log_activity() -> None:
    log = os.environ.get("FEDSYNTH_TEST_WATCH")
    if not log:
        return
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write_line(kind: str, value: object) -> None:
        os.write(file, f"{os.getpid()}\t{kind}\t{value!r}\n".encode())

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            write_line("connect", arguments[1])
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            write_line("look up", arguments[0])

    write_line("process", getattr(sys, "orig_argv", ()))
    os.register_at_fork(after_in_child=lambda: write_line("process", "fork"))
    sys.addaudithook(hook)


_log_activity()
