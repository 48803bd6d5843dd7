"""Starts the command line when Python is called as `python -m fedsynth`."""

from fedsynth.cli.app import main

main()
