"""From a query to passages: corpus, encoder, index, and the retriever that joins them."""
