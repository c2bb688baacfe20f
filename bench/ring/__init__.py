"""`make bench-ring`: cost and correctness of a ring, beside raw limits of the machine and Wirehead."""
