"""Read and change the membership of a world."""
