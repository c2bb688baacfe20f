"""Connect the session to torch's DataLoader, the Hugging Face Trainer and Lightning."""
