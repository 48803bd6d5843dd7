"""Runs the command line as `python -m fedsynth`."""

from fedsynth.cli.app import main

main()
