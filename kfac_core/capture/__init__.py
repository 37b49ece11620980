"""Where K-FAC listens to the model: hooks, the statistics that they collect, wrappers around the model."""
