"""Mutation tests: what breaks the code in one place must fail a test."""
