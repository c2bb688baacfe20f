"""The base model, its LoRA, and the optimizer of a Dreambooth job."""
