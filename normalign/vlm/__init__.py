"""The vision-language model with an aligner: model, chat format, packing, scoring, checkpoints."""
