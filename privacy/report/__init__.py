"""The privacy report of a run: its figures, its pages, and their verification."""
