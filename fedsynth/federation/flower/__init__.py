"""A federation over Flower (the extra `flower`): its SuperLink and SuperNodes carry our messages.

    records.py      our messages as Flower's and back
    server_app.py   the ServerApp: the rounds, over the Grid
    client_app.py   the ClientApp, for Flower's own simulation and for plain SuperNodes
    executor.py     what answers a SuperNode's messages at a data owner's, in place of the app
                    that a server sends there
    launch.py       Flower's SuperLink, whose control stays on its own machine, and SuperNode
    processes.py    these as processes, with what they must not do switched off
    serving.py      `fedsynth server`, and the app folder that `fedsynth deploy init` writes

Flower's API moves, so that the extra pins it to one minor version; nothing outside this package
imports it.
"""
