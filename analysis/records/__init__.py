"""From the record files of a sweep to the frames of a `Study`."""
