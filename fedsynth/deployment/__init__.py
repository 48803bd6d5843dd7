"""Federations across machines: data owners' nodes, their policies, the wire format, secure
aggregation and Flower.
"""
