"""A federation over Flower (the extra `flower`): its SuperLink and SuperNodes carry our messages.

    records.py      conversion of our messages to Flower's and back
    server_app.py   the ServerApp: the rounds, over the Grid
    client_app.py   the ClientApp, for Flower's own simulation and for plain SuperNodes
    executor.py     answers a SuperNode's messages at a data owner's, in place of the app
                    that a server sends there
    launch.py       Flower's SuperLink, whose control is limited to its own machine, and SuperNode
    processes.py    these as processes, with unwanted features switched off
    serving.py      `fedsynth server`, and the app folder that `fedsynth deploy init` writes

Flower's API changes, so the extra pins it to one minor version; nothing outside this package
imports it.
"""
