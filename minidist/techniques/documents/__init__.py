"""--document-separator: a sample holds several documents, and attention stays inside each document."""
