"""The settings of a run.

The modules define the types and default values of the settings, read and write the settings as
TOML, and check the settings before a run.
"""
