"""Tables and sentences of the documents, each made of committed rows: a file for each page."""
