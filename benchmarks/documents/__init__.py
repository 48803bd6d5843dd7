"""Numbers of the documents from committed rows: `TABLES` by name, and `SENTENCES`, each a document,
a text with {} for every number, and a function that returns the numbers."""
