"""Loaded by every Python process of the federation's test: writes down each process, each address
that it connects to, and each name that it looks up."""

import os
import sys


def _watch() -> None:
    log = os.environ.get("FEDSYNTH_TEST_WATCH")
    if not log:
        return
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(kind: str, what: object) -> None:
        os.write(file, f"{os.getpid()}\t{kind}\t{what!r}\n".encode())

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            say("connect", arguments[1])
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            say("look up", arguments[0])

    say("process", getattr(sys, "orig_argv", ()))
    os.register_at_fork(after_in_child=lambda: say("process", "fork"))
    sys.addaudithook(hook)


_watch()
