"""What a caller shows to a secured pool: tokens and certificates (:mod:`.credentials`), and the tickets that they are
good for (:mod:`.fetched`)."""
