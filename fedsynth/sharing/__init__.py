"""Shared sets: exports of runs, their files for hubs and ONNX, and what recipients do with them."""
