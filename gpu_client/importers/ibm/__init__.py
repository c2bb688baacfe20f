"""Import the trainer-controller files of IBM's fms-hf-tuning."""
