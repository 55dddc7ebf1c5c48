"""Text from files: vocabularies, tokens kept on disk, and the rows that models of text train on."""
