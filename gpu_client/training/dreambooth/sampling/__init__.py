"""Pictures that a Dreambooth job generates: class images and validation pictures."""
