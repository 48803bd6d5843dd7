"""fedsynth: private dataset condensation and data-free distillation for federated learning."""

__version__ = "0.1.0"
