"""The rules of the game: pure functions of frozen nouns."""
