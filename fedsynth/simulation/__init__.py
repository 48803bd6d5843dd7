"""Entry points for one machine: runs, synthesis, distillation, students and audits."""
