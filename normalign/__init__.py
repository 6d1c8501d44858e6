"""normalign: measures, fixes and proves norm imbalance in vision-language models."""
