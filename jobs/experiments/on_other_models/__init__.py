"""What K-FAC does with models that nobody here wrote, at one commit and at another."""
