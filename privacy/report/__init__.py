"""Privacy reports: their figures, pages and verification."""
