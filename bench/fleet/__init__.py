"""`make bench-fleet`: the tick at scale, the time to a claim, requests, and money lost in simulated nights."""
