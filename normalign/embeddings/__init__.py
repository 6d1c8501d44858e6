"""T, the target norm: found and measured by reading nothing but a model's embedding tensor.

From safetensors, from GGUF, or from the hub by range requests, row by row in NumPy: no torch, little memory.
"""
