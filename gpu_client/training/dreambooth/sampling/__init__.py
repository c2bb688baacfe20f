"""Generate the pictures of a Dreambooth job: class images and validation pictures."""
