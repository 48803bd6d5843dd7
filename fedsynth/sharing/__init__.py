"""Shared sets: exports of runs, files for hubs and ONNX, and tools for recipients."""
