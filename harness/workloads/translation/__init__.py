"""Multi30k: translation from English to German."""
