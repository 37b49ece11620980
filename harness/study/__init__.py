"""What is to run and how far it is: sweep files, filters, submission, status. Imports no torch."""
