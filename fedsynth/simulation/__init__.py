"""Functions that run on one machine: simulated federations, synthesis, distillation, student
training and audits.
"""
