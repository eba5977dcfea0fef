"""From a corpus to an index: build it, measure it, ship it."""
