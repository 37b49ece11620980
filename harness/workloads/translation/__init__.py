"""Multi30k: translation of sentences."""
