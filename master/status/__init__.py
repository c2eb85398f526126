"""What a master shows of the pool: recent events, rates, one JSON document, and the page that draws it."""
