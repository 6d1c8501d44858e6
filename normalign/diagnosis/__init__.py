"""Probes: what norms, directions and attention do from layer to layer."""
