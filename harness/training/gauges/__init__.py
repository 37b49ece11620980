"""The drawer of gauges: what is read beside the clock. A gauge returns plain numbers by name."""
