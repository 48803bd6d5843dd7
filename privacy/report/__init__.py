"""Privacy reports of runs, with their figures, pages and verification."""
