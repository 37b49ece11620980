"""The report of a study: one HTML page that opens offline, with Markdown and LaTeX of its tables.

`answers.py` has the sentences at its top, `page.py` the order of its parts.
"""
