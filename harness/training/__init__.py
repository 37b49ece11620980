"""One rank: joins its world, trains, measures every phase and writes records."""
