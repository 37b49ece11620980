"""Guards against mistakes around K-FAC: each names what is wrong, and none makes a device wait."""
