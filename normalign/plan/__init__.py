"""Time and memory of a profile before it is run: from model configurations alone, without torch."""
