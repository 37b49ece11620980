"""BERT (masked words) and GPT (next word) on text files."""
