"""One rank of a run: joins its world, trains, measures every phase and writes records."""
