"""Runs federations over Flower (the extra `flower`). Flower's SuperLink and SuperNodes carry the
messages.

    server_app.py   the ServerApp, which runs the rounds over Flower's Grid
    executor.py     answers a SuperNode's messages on the data owner's machine, so that no app from
                    the server runs there; converts messages to Flower's format and back; the
                    ClientApp, for Flower's simulation and for plain SuperNodes
    processes.py    runs Flower's SuperLink and SuperNode as processes, with unwanted features
                    switched off; only the server's own machine can control the SuperLink
    joining.py      `fedsynth client`
    serving.py      `fedsynth server`, and the app folder that `fedsynth deploy init` writes
    keys.py         keys and certificates for trials

Flower's API changes between versions, so the extra requires one minor version. Nothing outside this
package imports Flower.
"""
