"""Runs federations over Flower (the extra `flower`). Flower's SuperLink and SuperNodes carry the
messages.

    server_app.py   the ServerApp, which runs the rounds over Flower's Grid
    client_app.py   the ClientApp, for Flower's simulation and for plain SuperNodes
    executor.py     answers a SuperNode's messages on the data owner's machine, so that no app from
                    the server runs there; converts messages to Flower's format and back
    launch.py       starts Flower's SuperLink and SuperNode; only the server's own machine can
                    control the SuperLink
    processes.py    runs these two as processes, with unwanted features switched off
    joining.py      `fedsynth client`
    serving.py      `fedsynth server`, and the app folder that `fedsynth deploy init` writes
    keys.py         keys and certificates for trials

Flower's API changes between versions, so the extra requires one minor version. Nothing outside this
package imports Flower.
"""
