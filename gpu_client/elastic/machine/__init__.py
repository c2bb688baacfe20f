"""Let the processes of one machine take part in a world as one node."""
