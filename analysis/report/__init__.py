"""The report of a study: one HTML page that opens offline, with Markdown and LaTeX of its tables."""
