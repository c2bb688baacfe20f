"""What a ring costs and holds, beside the machine's raw limits and Wirehead: `make bench-ring`."""
