"""Federations over machines: nodes, policies, frames, secure aggregation and Flower."""
