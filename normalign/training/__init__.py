"""Training: the trainable table, the loop and its checkpoints. Torch, transformers and accelerate only."""
