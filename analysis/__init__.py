"""Floor 3: turns records into tables, figures and a report. Runs on a laptop; imports no torch."""
