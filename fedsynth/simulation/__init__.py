"""What a user starts on one machine: runs, synthesis, distillation, students and audits."""
