"""What the documents print of committed rows: `TABLES` by name, and `SENTENCES`, each a document,
a text with {} for every number, and a function that returns the numbers."""
