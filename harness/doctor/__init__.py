"""Whether a site is fit for a study, asked before a study is: its login node, then a small job on it."""
