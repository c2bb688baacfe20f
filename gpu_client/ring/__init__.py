"""Cache generated samples between many generators and one training; see README.md."""
