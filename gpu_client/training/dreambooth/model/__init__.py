"""Load the base model of a Dreambooth job, add its LoRA, and optimize the LoRA."""
