"""--document-separator: attention stays inside documents, of which a sample holds several."""
