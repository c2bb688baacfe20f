"""`make demo`: the whole product at work on one machine, with a worker killed in the middle."""
