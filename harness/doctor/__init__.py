"""Checks whether a site is fit for a study: the login node first, then a small job on the site."""
